"""Makes a tiny checkpoint of Chandra 2's architecture that says what a test wants, by how large the image is.

    PYTHON make_checkpoint.py OUT REPLIES.json       PYTHON: one with torch and transformers 5, such as vLLM's

It has the parts of the real one (vision tower, linear and full attention, MTP layer, chat template, image processor),
so a server loads and runs it as it would that. REPLIES.json:

    {"prompt": the text that is sent beside the image,
     "replies": [{"tokens": 392, "text": "<div ...", "loop": 2}, ...]}

A page gets the reply whose `tokens` (image tokens, 32 x 32 px each) is nearest to its own number. With "loop": n the
last n pieces of the reply follow for ever at temperature 0, and with a growing chance of an end when it is warmer.

How: of all layers only the full attention writes anything. Its queries are zero, so it attends to all positions alike
and tells the share of image tokens among them. The output layer maps the start of the reply and that share to the
first piece of a reply, and each piece to the next one; pieces are tokens of their own, each with an axis of its own.
The MTP layer passes the last token on, so its drafts are right but for the first piece.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3_5Config, Qwen3_5ForConditionalGeneration

SPECIAL = "<|endoftext|> <|im_start|> <|im_end|> <|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|>".split()
START = "<|reply|>"
THINK = "<think>", "</think>"
TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{% if 'image' in part or 'image_url' in part or part.type in ('image', 'image_url') -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor -%}
{% if add_generation_prompt %}<|im_start|>assistant
<think>

</think>

<|reply|>{% endif %}"""

SEEN, IMAGE, GOING, FIRST = range(4)  # axes: share of image tokens; an image token; within a reply; its start
FREE = 4  # the first axis of the pieces
SURE = 60.0  # logit of the next piece
CHOICE = 4000.0  # logit that the squared difference of two shares counts
MIDDLE = 0.65  # of the shares; counted from it they are small numbers, which bfloat16 tells apart better
LOOP_END = -1.0  # logit of an end after a round of a loop, against one more round


def cut(text: str, taken: set[str]) -> list[str]:
    """A text in pieces of six characters, or as many more as make each one new."""
    pieces: list[str] = []
    while text:
        size = next((n for n in range(6, len(text)) if text[:n] not in taken), len(text))
        piece, text = text[:size], text[size:]
        while piece in taken and pieces:  # an end that another reply has, too
            taken.remove(pieces[-1])
            piece = pieces.pop() + piece
        if piece in taken:
            raise SystemExit(f"two replies are alike: {piece!r}")
        taken.add(piece)
        pieces.append(piece)
    return pieces


def make_tokenizer(prompt: str, pieces: list[str]) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=900, min_frequency=1, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator([prompt, "user assistant"], trainer)
    core.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in [*SPECIAL, START]])
    core.add_tokens([AddedToken(name, normalized=False) for name in [*THINK, *pieces]])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=262_144,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_config(tokenizer: PreTrainedTokenizerFast, width: int) -> Qwen3_5Config:
    """The real configuration with every size as small as it goes."""
    token = tokenizer.convert_tokens_to_ids
    text = {
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "hidden_size": width,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "full_attention_interval": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "attn_output_gate": True,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262_144,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "tie_word_embeddings": False,
        "eos_token_id": token("<|im_end|>"),
        "pad_token_id": token("<|endoftext|>"),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
        },
    }
    vision = {
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 2304,
        "out_hidden_size": width,
        "deepstack_visual_indexes": [],
    }
    return Qwen3_5Config(
        architectures=["Qwen3_5ForConditionalGeneration"],
        dtype="bfloat16",
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=False,
        text_config=text,
        vision_config=vision,
    )


def silence(weights: dict[str, torch.Tensor]) -> None:
    """No layer writes to what is passed from layer to layer, and nothing is embedded or said."""
    for name, tensor in weights.items():
        last = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
        if (last and not name.startswith("model.visual")) or name.endswith(("embed_tokens.weight", "lm_head.weight")):
            tensor.zero_()


def see_the_image(weights: dict[str, torch.Tensor], width: int) -> None:
    """Every image token is the same vector; the attention layer tells their share of all tokens."""
    weights["model.visual.merger.linear_fc2.weight"].zero_()
    weights["model.visual.merger.linear_fc2.bias"].zero_()[IMAGE] = 1.0
    attention = "model.language_model.layers.3.self_attn."
    weights[attention + "q_proj.weight"].zero_()  # its half that is the gate too, which then lets half through
    weights[attention + "v_proj.weight"].zero_()[0, IMAGE] = 2 * width**-0.5
    weights[attention + "o_proj.weight"].zero_()[SEEN, 0] = 1.0


def speak(weights: dict[str, torch.Tensor], replies: list[dict], token, words: int, width: int) -> None:
    """The chains of pieces. `words`: tokens of the prompt beside the image's."""
    embed, head = weights["model.language_model.embed_tokens.weight"], weights["lm_head.weight"]
    unit = width**-0.5  # RMSNorm gives a single axis the square root of the width
    embed[token(START), FIRST] = 1.0
    axis = FREE
    for reply in replies:
        ids = [token(piece) for piece in reply["pieces"]]
        back = ids[-reply["loop"]] if reply.get("loop") else token("<|im_end|>")
        # The largest of 2ab - b^2, a and b the page's and this reply's share from the middle, is that of the nearest b.
        apart = reply["tokens"] / (reply["tokens"] + words) - MIDDLE
        head[ids[0], SEEN] = 2 * apart * CHOICE * unit
        head[ids[0], FIRST] = (0.05 - apart**2 - 2 * apart * MIDDLE) * CHOICE * unit
        head[ids[0], GOING] = -4 * CHOICE * unit
        for now, following in zip(ids, [*ids[1:], back], strict=True):
            embed[now, axis] = embed[now, GOING] = 1.0
            head[following, axis] = SURE * unit
            if following == back and reply.get("loop") and now == ids[-1]:
                head[token("<|im_end|>"), axis] = (SURE + 1.6 * LOOP_END) * unit
            axis += 1


def add_mtp(weights: dict[str, torch.Tensor], width: int) -> None:
    """The MTP layer, which transformers does not build: it gives back the last token's embedding."""
    for name in [name for name in weights if name.startswith("model.language_model.layers.3.")]:
        tensor = weights[name].clone()
        silent = name.endswith(("o_proj.weight", "down_proj.weight"))
        weights["mtp.layers.0." + name.split("layers.3.")[1]] = tensor.zero_() if silent else tensor
    for name in ("mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"):
        weights[name + ".weight"] = torch.zeros(width, dtype=torch.bfloat16)  # these norms scale by 1 + weight
    weights["mtp.fc.weight"] = torch.cat([torch.eye(width), torch.zeros(width, width)], 1).to(torch.bfloat16)


def save_processors(out: Path, token) -> None:
    image = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": 3136, "longest_edge": 6_291_456},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    video = {**image, "video_processor_type": "Qwen3VLVideoProcessor"}
    del video["image_processor_type"]
    ends = [token("<|im_end|>"), token("<|endoftext|>")]
    for name, content in (
        ("preprocessor_config.json", image),
        ("video_preprocessor_config.json", video),
        ("generation_config.json", {"eos_token_id": ends, "pad_token_id": ends[1]}),
    ):
        (out / name).write_text(json.dumps(content, indent=1), "utf-8")


def make(out: Path, prompt: str, replies: list[dict]) -> None:
    torch.manual_seed(0)
    taken: set[str] = set(THINK)
    replies = [reply | {"pieces": cut(reply["text"], taken)} for reply in replies]
    pieces = [piece for reply in replies for piece in reply["pieces"]]
    width = max(128, -(-(FREE + len(pieces)) // 64) * 64)
    tokenizer = make_tokenizer(prompt, pieces)
    token = tokenizer.convert_tokens_to_ids
    asked = [{"role": "user", "content": [{"type": "image_url"}, {"type": "text", "text": prompt}]}]
    rendered = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    words = len(tokenizer(rendered)["input_ids"]) - 1

    model = Qwen3_5ForConditionalGeneration(make_config(tokenizer, width)).to(torch.bfloat16)
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    save_processors(out, token)
    weights = load_file(out / "model.safetensors")
    silence(weights)
    see_the_image(weights, width)
    speak(weights, replies, token, words, width)
    add_mtp(weights, width)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    print(f"{out}: {sum(t.numel() for t in weights.values()) / 1e6:.1f} M parameters, {words} tokens of prompt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("replies", type=Path)
    args = parser.parse_args()
    given = json.loads(args.replies.read_text("utf-8"))
    make(args.out, given["prompt"], given["replies"])
