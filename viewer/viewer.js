// A run's pages: the list of them with its filters and search, and one page beside what was read from it.
//
// From top to bottom: Data (scripts that call OCR.put), Place (what the address says), Search, List, Page, Keys.
// Nothing is fetched. Of what documents and servers wrote, only the blocks' HTML is set as HTML: view.py sanitized it.
"use strict";

// ---- Data

const nonce = document.currentScript.nonce;
const waiting = new Map(); // key -> [resolve]
const loaded = new Map(); // key -> promise

const OCR = {
  put(key, value) {
    waiting.get(key)?.(value);
    waiting.delete(key);
  },
};

/** The value of a data file; null when it is not there. */
function load(key) {
  if (!loaded.has(key)) {
    if (loaded.size > 400) forgetPages();
    loaded.set(key, new Promise((resolve) => {
      waiting.set(key, resolve);
      const script = document.createElement("script");
      script.nonce = nonce;
      script.src = fileOf(key);
      script.onerror = () => { waiting.delete(key); resolve(null); };
      script.onload = () => script.remove();
      document.head.append(script);
    }));
  }
  return loaded.get(key);
}

function fileOf(key) {
  const [kind, id, number] = key.split("/");
  return kind === "page" ? `pages/${id}/${number.padStart(4, "0")}.js` : `data/${key.replaceAll("/", "-")}.js`;
}

function forgetPages() {
  for (const key of loaded.keys()) if (key.startsWith("page/")) loaded.delete(key);
}

let run; // data/run.js
const UNSCORED = 0;

const named = ([id, rank, doc, number, status, why, width, height, drawn, score, tests]) =>
  ({ id, rank, doc, number, status: run.statuses[status], why, width, height, drawn, score, tests });

/** The row at a position of a list: "rows" in the documents' order, "worst" by what was scored. */
async function rowAt(list, position) {
  if (position < 0 || position >= run.pages) return null;
  const chunk = await load(`${list}/${Math.floor(position / run.chunk)}`);
  return chunk ? named(chunk[position % run.chunk]) : null;
}

async function documentAt(place) {
  const chunk = await load(`docs/${Math.floor(place / run.chunk)}`);
  if (!chunk) return null;
  const [, id, name, folder, first, count, counts, error, report] = chunk[place % run.chunk];
  return { place, id, name, folder, first, count, counts, error, report };
}

// ---- Place

/** What the address says: a page, or the list; and which pages the list holds. */
function readPlace() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const said = new URLSearchParams(query || "");
  const page = /^p\/(\d+)$/.exec(path);
  return {
    page: page ? Number(page[1]) : null,
    show: said.get("show") || "all",
    sort: run.scored && said.get("sort") !== "order" ? "worst" : "order",
    doc: said.has("doc") ? Number(said.get("doc")) : null,
    q: said.get("q") || "",
    as: said.get("as") || (run.documents > 1 && !run.scored ? "documents" : "pages"),
  };
}

function addressOf(place) {
  const said = new URLSearchParams();
  if (place.show !== "all") said.set("show", place.show);
  if (run.scored && place.sort === "order") said.set("sort", "order");
  if (place.doc !== null) said.set("doc", place.doc);
  if (place.q) said.set("q", place.q);
  if (place.as !== (run.documents > 1 && !run.scored ? "documents" : "pages")) said.set("as", place.as);
  const query = said.toString();
  return `#/${place.page === null ? "" : `p/${place.page}`}${query ? `?${query}` : ""}`;
}

const go = (change) => { location.hash = addressOf({ ...readPlace(), ...change }); };

const FILTERS = {
  all: () => true,
  ok: (row) => row.status === "ok",
  suspect: (row) => row.status === "suspect",
  failed: (row) => row.status === "failed",
  unfinished: (row) => row.status === "unfinished",
  bad: (row) => isBad(row.score),
  tests: (row) => row.tests !== UNSCORED,
};
const doubtful = (row) => row.status !== "ok" || isBad(row.score);
const isBad = (score) => score !== UNSCORED && (run.scored === "tests" ? score[0] < score[1] : score[0] > 0);

/** Whether a filter may let a page of a chunk through, from the counts in the summary. */
function mayPass(counts, wanted) {
  const at = [...run.statuses, "bad", "tests"].findIndex((name) => FILTERS[name] === wanted);
  if (wanted === doubtful) return counts.some((count, i) => count && run.statuses[i] !== "ok");
  return at < 0 || counts[at] > 0;
}

/** The rows that a place's list holds, from a position on, forwards or backwards. */
async function* rowsOf(place, from = null, step = 1, wanted = FILTERS[place.show] || FILTERS.all) {
  if (place.q) return yield* found(place, from, step, wanted);
  const document = place.doc === null ? null : await documentAt(place.doc);
  const list = document || place.sort === "order" ? "rows" : "worst";
  const [low, high] = document ? [document.first, document.first + document.count] : [0, run.pages];
  for (let i = from ?? (step > 0 ? low : high - 1); i >= low && i < high; i += step) {
    const chunk = Math.floor(i / run.chunk);
    if (!mayPass(run.counts[list][chunk], wanted)) {
      i = step > 0 ? (chunk + 1) * run.chunk - 1 : chunk * run.chunk;
      continue;
    }
    const row = await rowAt(list, i);
    if (row && wanted(row)) yield row;
  }
}

const positionIn = (place, row) => (place.doc === null && place.sort === "worst" ? row.rank : row.id);

/** The page after or before one, in the list that the address tells. */
async function neighbour(place, row, step, wanted) {
  const from = place.q ? row.id : positionIn(place, row);
  for await (const next of rowsOf(place, place.q ? from : from + step, step, wanted)) {
    if (next.id !== row.id) return next;
  }
  return null;
}

// ---- Search (view.py's search_words, folded and shard_of say the same)

const LETTERS = /[\p{L}\p{N}\p{M}]+/gu;
const UNSPACED = /[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\u{20000}-\u{2ffff}]+/gu;

function folded(text) {
  return text.toLowerCase().normalize("NFKD").replace(/[\u0300-\u036f]/g, "").normalize("NFKC");
}

/** The words of a query: [word, whether only its beginning]. The last one may be going on. */
function queryWords(query) {
  const words = [];
  for (const run of folded(query).match(LETTERS) || []) {
    for (const part of run.match(UNSPACED) || []) {
      const signs = [...part];
      if (signs.length === 1) words.push([part, false]);
      for (let i = 0; i + 1 < signs.length; i++) words.push([signs[i] + signs[i + 1], false]);
    }
    for (const word of run.split(UNSPACED)) if (word) words.push([word.slice(0, 40), false]);
  }
  const last = words.at(-1);
  if (last && [...last[0]].length > 1 && !/\s$/.test(query)) last[1] = true;
  return words;
}

function shardOf(word, shards) {
  let number = 0;
  for (const sign of [...word].slice(0, 2)) number = (number * 31 + sign.codePointAt(0)) % 1000003;
  return number % shards;
}

/** The pages of a segment that hold a word, or a word that begins so. */
async function pagesWith([word, begins], segment) {
  const [first, , shards] = run.segments[segment];
  const text = (await load(`words/${segment}/${shardOf(word, shards)}`)) || "";
  const pages = new Set();
  for (let at = text.startsWith(word) ? 0 : text.indexOf(`\n${word}`) + 1; at > 0 || text.startsWith(word, at);) {
    const end = text.indexOf("\n", at);
    const line = text.slice(at, end < 0 ? text.length : end);
    const gap = line.indexOf(" ");
    if (begins ? line.startsWith(word) : line.slice(0, gap) === word) {
      let page = first;
      for (const step of line.slice(gap + 1).split(",")) pages.add((page += Number(step)));
    } else if (!line.startsWith(word)) break;
    if (end < 0) break;
    at = end + 1;
  }
  return pages;
}

const searches = new Map(); // query -> page ids

async function search(query) {
  if (!searches.has(query)) {
    const words = queryWords(query);
    const ids = [];
    for (let i = 0; i < run.segments.length && words.length; i++) {
      const sets = await Promise.all(words.map((word) => pagesWith(word, i)));
      ids.push(...[...sets[0]].filter((id) => sets.every((set) => set.has(id))).sort((a, b) => a - b));
    }
    searches.set(query, ids);
  }
  return searches.get(query);
}

async function* found(place, from, step, wanted) {
  const ids = await search(place.q);
  const ordered = step > 0 ? ids : ids.toReversed();
  for (const id of ordered) {
    if (from !== null && (step > 0 ? id <= from : id >= from)) continue;
    const row = await rowAt("rows", id);
    if (row && wanted(row) && (place.doc === null || row.doc === place.doc)) yield row;
  }
}

// ---- Elements

function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && typeof value !== "string") element[name] = value;
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const $ = (id) => document.getElementById(id);
const main = $("main");
const number = new Intl.NumberFormat("en");
const many = (n, what) => `${number.format(n)} ${what}${n === 1 ? "" : "s"}`;

let drawing = 0; // a newer drawing makes an older one stop

function tell(text) {
  $("live").textContent = text;
}

/** Tells readers who see, too. */
function say(text) {
  tell(text);
  $("toast").textContent = text;
  $("toast").hidden = false;
  clearTimeout(say.timer);
  say.timer = setTimeout(() => { $("toast").hidden = true; }, 3000);
}

const pictureOf = (document, n, small) => `pages/${document.id}/${String(n).padStart(4, "0")}${small ? "s" : ""}.webp`;

const badge = (status) => h("span", { class: `badge ${status}` }, status);

function scoreWords(score) {
  if (score === UNSCORED) return "";
  if (run.scored === "tests") return `${score[0]} of ${many(score[1], "test")} passed`;
  return score[0] ? `${many(score[0], "word")} of ${number.format(score[1])} differ${score[0] === 1 ? "s" : ""}` : "the same words";
}

/** Tests that one of two runs passes and the other does not. */
function testsThatDiffer([here, there]) {
  const parts = [[here, run.name], [there, run.other]].filter(([n]) => n).map(([n, name]) => `${many(n, "test")} passed only in ${name}`);
  return parts.join(", ");
}

// ---- List

async function showList(place, turn) {
  document.title = run.name;
  document.body.className = "list";
  const body = h("div", { class: "results" });
  const document_ = place.doc === null ? null : await documentAt(place.doc);
  if (turn !== drawing) return;
  main.replaceChildren(await heading(place, document_), toolbar(place, document_), body);
  const asDocuments = place.as === "documents" && !place.q && !document_;
  await (asDocuments ? fillDocuments(place, body, turn) : fillPages(place, body, turn));
}

async function heading(place, document_) {
  if (document_) {
    const report = document_.report ? h("a", { href: document_.report, class: "quiet" }, "Read it as one page") : null;
    return h("div", { class: "intro" },
      h("p", {}, h("a", { href: addressOf({ ...place, doc: null }) }, "All documents")),
      h("h1", { dir: "auto" }, document_.name),
      h("p", { class: "soft" }, many(document_.count, "page"), report && document.createTextNode(" · "), report));
  }
  const facts = [many(run.documents, "document"), many(run.pages, "page")];
  if (run.model) facts.push(run.model);
  if (run.benchmark) facts.push(run.benchmark);
  if (run.headline) facts.push(`score ${(100 * run.headline).toFixed(1)}`);
  if (run.unread) facts.push(`${many(run.unread, "document")} could not be read`);
  if (!run.finished) facts.push("the run did not finish");
  const title = run.other ? `${run.name} and ${run.other}` : run.name;
  return h("div", { class: "intro" }, h("h1", { dir: "auto" }, title), h("p", { class: "soft facts" }, ...facts.map((fact) => h("span", {}, fact))));
}

function toolbar(place, document_) {
  const counts = document_ ? document_.counts : run.statuses.map((_, i) => run.counts.rows.reduce((sum, chunk) => sum + chunk[i], 0));
  const chips = [["all", "All", counts.reduce((a, b) => a + b, 0)]];
  run.statuses.forEach((status, i) => {
    if (counts[i] || status === "suspect" || status === "failed") chips.push([status, status, counts[i]]);
  });
  if (run.scored && !document_) {
    const bad = run.counts.rows.reduce((sum, chunk) => sum + chunk[run.statuses.length], 0);
    chips.push(["bad", run.scored === "tests" ? "with failed tests" : "that differ", bad]);
    const tests = run.counts.rows.reduce((sum, chunk) => sum + chunk[run.statuses.length + 1], 0);
    if (tests) chips.push(["tests", "whose tests differ", tests]);
  }
  const filters = h("div", { class: "chips", role: "group", "aria-label": "Show pages" }, ...chips.map(([show, label, n]) =>
    h("button", { type: "button", class: `chip ${show}`, "aria-pressed": String(place.show === show), "data-show": show, onclick: () => go({ show }) },
      label, " ", h("span", { class: "n" }, number.format(n)))));
  const choices = h("div", { class: "choices" });
  if (run.scored && !document_ && !place.q) {
    const worst = run.scored === "tests" ? "worst first" : "most different first";
    choices.append(choice("Order", place.sort, [["worst", worst], ["order", "as in the documents"]], (sort) => go({ sort })));
  }
  if (run.documents > 1 && !document_ && !place.q) {
    choices.append(choice("Show as", place.as, [["documents", "documents"], ["pages", "pages"]], (as) => go({ as })));
  }
  return h("div", { class: "toolbar" }, filters, choices);
}

function choice(label, value, options, change) {
  const select = h("select", { onchange: () => change(select.value) }, ...options.map(([name, words]) => h("option", { value: name, selected: name === value }, words)));
  return h("label", {}, `${label} `, select);
}

/** Adds what a generator yields to a list, some at a time, as the reader comes to its end. */
async function fillAsNeeded(body, list, items, draw, turn, step) {
  const more = h("button", { type: "button", class: "more" }, "Show more");
  let busy = false;
  let shown = 0;
  const add = async () => {
    if (busy) return;
    busy = true;
    for (let i = 0; i < step; i++) {
      const { value, done } = await items.next();
      if (turn !== drawing) return;
      if (done) {
        more.remove();
        watcher.disconnect();
        break;
      }
      list.append(await draw(value));
      shown++;
    }
    busy = false;
    if (more.isConnected && more.getBoundingClientRect().top < innerHeight + 400) setTimeout(add);
  };
  const watcher = new IntersectionObserver((seen) => seen.some((entry) => entry.isIntersecting) && add(), { rootMargin: "400px" });
  more.addEventListener("click", add);
  body.append(list, more);
  await add();
  watcher.observe(more);
  return () => shown;
}

async function fillPages(place, body, turn) {
  const list = h("ul", { class: place.q ? "hits" : "grid" });
  const shown = await fillAsNeeded(body, list, rowsOf(place), (row) => card(place, row), turn, place.q ? 20 : 60);
  if (turn !== drawing) return;
  const n = place.q ? (await search(place.q)).length : null;
  if (!shown()) body.replaceChildren(h("p", { class: "empty" }, place.q ? `No page holds “${place.q}”.` : "No page here."));
  else if (place.q) body.prepend(h("p", { class: "soft count" }, `${many(n, "page")} with “${place.q}”`));
  tell(place.q ? many(n, "page") : "");
}

async function card(place, row) {
  const document_ = await documentAt(row.doc);
  const alone = document_.count === 1 && place.doc === null;
  const link = h("a", { href: addressOf({ ...place, page: row.id }), class: "card", "data-status": row.status },
    thumbnail(document_, row),
    h("span", { class: "words" },
      h("span", { class: "label", dir: "auto", title: alone ? document_.name : null }, alone ? document_.name : `Page ${row.number}`),
      alone || place.doc !== null ? null : h("span", { class: "soft folder", dir: "auto", title: document_.name }, document_.name),
      row.status === "ok" ? null : badge(row.status),
      row.score === UNSCORED ? null : h("span", { class: isBad(row.score) ? "score bad" : "score" }, scoreWords(row.score)),
      row.tests === UNSCORED ? null : h("span", { class: "score bad" }, testsThatDiffer(row.tests)),
      row.why ? h("span", { class: "why", dir: "auto" }, row.why) : null,
      place.q ? await snippet(document_, row, place.q) : null));
  return h("li", {}, link);
}

function thumbnail(document_, row) {
  const sheet = h("span", { class: "sheet" });
  const scale = Math.min(120 / row.width, 160 / row.height);
  sheet.style.width = `${Math.max(8, row.width * scale)}px`;
  sheet.style.height = `${Math.max(8, row.height * scale)}px`;
  if (row.drawn) sheet.append(h("img", { src: pictureOf(document_, row.number, true), alt: "", loading: "lazy", decoding: "async" }));
  return h("span", { class: "thumb" }, sheet);
}

async function snippet(document_, row, query) {
  const page = await load(`page/${document_.id}/${row.number}`);
  const text = page?.text || "";
  const word = queryWords(query)[0]?.[0] || "";
  const at = Math.max(0, folded(text).indexOf(word));
  const start = Math.max(0, text.lastIndexOf(" ", Math.max(0, at - 60)) + 1);
  const piece = text.slice(start, start + 220);
  const line = h("span", { class: "snippet", dir: "auto" });
  if (start) line.append("… ");
  line.append(...marked(piece, queryWords(query).map(([w]) => w)), start + 220 < text.length ? " …" : "");
  return line;
}

/** A text with the searched words in <mark>. */
function marked(text, words) {
  const parts = [];
  let last = 0;
  for (const match of text.matchAll(LETTERS)) {
    const small = folded(match[0]);
    if (!words.some((word) => small.startsWith(word) || (word.length > 1 && /[^\u0000-\u0e00]/.test(word) && small.includes(word)))) continue;
    parts.push(text.slice(last, match.index), h("mark", {}, match[0]));
    last = match.index + match[0].length;
  }
  return [...parts, text.slice(last)];
}

async function* documentsOf(place) {
  const at = run.statuses.indexOf(place.show);
  for (let i = 0; i < run.documents; i++) {
    const document_ = await documentAt(i);
    if (document_ && (place.show === "all" || (at >= 0 && document_.counts[at]) || (place.show === "failed" && document_.error))) yield document_;
  }
}

async function fillDocuments(place, body, turn) {
  const list = h("ul", { class: "documents" });
  const shown = await fillAsNeeded(body, list, documentsOf(place), (item) => documentCard(place, item), turn, 40);
  if (turn === drawing && !shown()) body.replaceChildren(h("p", { class: "empty" }, "No document here."));
}

async function documentCard(place, item) {
  const row = item.count ? await rowAt("rows", item.first) : null;
  const parts = run.statuses.map((status, i) => (item.counts[i] && status !== "ok" ? h("span", { class: `badge ${status}` }, `${item.counts[i]} ${status}`) : null));
  const bar = h("span", { class: "bar", "aria-hidden": "true" }, ...run.statuses.map((status, i) => {
    const part = h("span", { class: status });
    part.style.flexGrow = item.counts[i];
    return item.counts[i] ? part : null;
  }));
  const words = h("span", { class: "words" },
    h("span", { class: "label", dir: "auto", title: item.name }, item.name),
    item.folder !== item.name.replace(/\.[^.]*$/, "") && !item.error ? h("span", { class: "soft folder", dir: "auto" }, item.folder) : null,
    h("span", { class: "soft" }, many(item.count, "page")), ...parts,
    item.error ? h("span", { class: "why", dir: "auto" }, item.error) : null, item.count ? bar : null);
  const sheet = row ? thumbnail(item, row) : h("span", { class: "thumb" });
  if (!item.count) return h("li", {}, h("div", { class: "card" }, sheet, words));
  const target = item.count === 1 ? { ...place, page: item.first } : { ...place, doc: item.place };
  return h("li", {}, h("a", { class: "card", href: addressOf(target) }, sheet, words));
}

// ---- Page

const GROUPS = {
  "Section-Header": "head", "Table-Of-Contents": "list", "List-Group": "list", Table: "table", Form: "form",
  Image: "figure", Figure: "figure", Picture: "figure", Diagram: "figure", "Chemical-Block": "figure", "Equation-Block": "maths",
  "Code-Block": "code", Caption: "note", Footnote: "note", Bibliography: "note", "Page-Header": "edge", "Page-Footer": "edge",
  "Blank-Page": "edge", "Complex-Block": "complex",
};
const groupOf = (label) => GROUPS[label] || "text";

const view = { tab: null, boxes: true, zoom: 1, row: null, page: null, document: null, chosen: null, difference: null };

async function showPage(place, turn) {
  const row = await rowAt("rows", place.page);
  const document_ = row && (await documentAt(row.doc));
  const page = document_ && (await load(`page/${document_.id}/${row.number}`));
  if (turn !== drawing) return;
  if (!page) {
    main.replaceChildren(h("p", { class: "empty" }, "This page is not here. Run view.py again."));
    return;
  }
  Object.assign(view, { row, page, document: document_, chosen: null });
  document.title = `${document_.name}, page ${row.number} · ${run.name}`;
  document.body.className = page.other ? "page compare" : "page";
  main.replaceChildren(await pageBar(place), h("div", { class: "panes" }, paperPane(), readingPane(place)));
  drawTab(place);
  zoom(view.zoom);
  tell(`${document_.name}, page ${row.number}, ${row.status}`);
  const ahead = await neighbour(place, row, 1);
  if (ahead && turn === drawing) preload(ahead);
}

async function preload(row) {
  const document_ = await documentAt(row.doc);
  await load(`page/${document_.id}/${row.number}`);
  if (row.drawn) new Image().src = pictureOf(document_, row.number, false);
}

async function pageBar(place) {
  const { row, document: document_, page } = view;
  const [before, after] = await Promise.all([neighbour(place, row, -1), neighbour(place, row, 1)]);
  const step = (next, words, sign, id) => h("a", { id, class: "step", title: words, "aria-label": words, href: next && addressOf({ ...place, page: next.id }), "aria-disabled": next ? null : "true", role: next ? null : "link" }, sign);
  const jump = h("input", { id: "jump", inputmode: "numeric", value: String(row.number), "aria-label": `Page of ${document_.name}`, size: "3", onchange: () => jumpTo(jump.value) });
  return h("div", { class: "pagebar" },
    h("a", { href: addressOf({ ...place, page: null }), class: "back", id: "back" }, "‹ ", place.q ? "Results" : "Pages"),
    h("h1", { dir: "auto" }, document_.name),
    document_.count > 1 ? h("span", { class: "soft of" }, "page ", jump, ` of ${number.format(document_.count)}`) : null,
    badge(row.status),
    row.score === UNSCORED ? null : h("span", { class: isBad(row.score) ? "score bad" : "score" }, scoreWords(row.score)),
    h("nav", { class: "steps", "aria-label": "Pages" }, step(before, "Previous page", "←", "previous"), step(after, "Next page", "→", "next"),
      h("button", { type: "button", id: "next-doubtful", class: "step", title: `Next page that is ${DOUBTS()} (s)`, onclick: () => toDoubtful(1) }, "next doubtful")),
    page.error || page.reasons.length ? h("p", { class: `reasons ${row.status}`, dir: "auto" }, page.error || page.reasons.join("; ")) : null);
}

const DOUBTS = () => `suspect, failed${{ tests: ", or fails a test", words: ", or differs" }[run.scored] || " or unfinished"}`;

/** Goes to the page of this document with a number; they are in order, but some may be missing. */
async function jumpTo(said) {
  const wanted = Number(said);
  const { first, count, name } = view.document;
  let [low, high] = [first, first + count - 1];
  while (low <= high) {
    const middle = Math.floor((low + high) / 2);
    const row = await rowAt("rows", middle);
    if (row?.number === wanted) return go({ page: row.id });
    if (!row || !(row.number > wanted)) low = middle + 1;
    else high = middle - 1;
  }
  say(`${name} has no page ${said}`);
  $("jump").value = String(view.row.number);
}

async function toDoubtful(step) {
  const place = readPlace();
  const next = await neighbour({ ...place, show: "all" }, view.row, step, doubtful);
  if (next) go({ page: next.id, show: FILTERS[place.show]?.(next) ? place.show : "all" });
  else say(`No page ${step > 0 ? "after" : "before"} this one is ${DOUBTS()}`);
}

/** The page's picture with its boxes. */
function paperPane() {
  const { page, row, document: document_ } = view;
  const sheet = h("div", { class: "sheet", id: "sheet" });
  sheet.style.aspectRatio = `${page.size[0]} / ${page.size[1]}`;
  if (page.picture) sheet.append(h("img", { src: pictureOf(document_, row.number, false), alt: `Page ${row.number}` }));
  page.blocks.forEach((block, i) => {
    for (const inner of block.inside || []) sheet.append(place_(h("span", { class: `box inner g-${groupOf(inner.label)}` }), inner.box, 2));
    if (block.box) sheet.append(boxOf(block, i));
  });
  const labels = [...new Set(page.blocks.map((block) => block.label))];
  const legend = h("ul", { class: "legend", "aria-label": "Labels on this page" }, ...labels.map((label) => h("li", { class: `g-${groupOf(label)}` }, label)));
  const toggle = h("button", { type: "button", id: "boxes", "aria-pressed": String(view.boxes), title: "Boxes (b)", onclick: toggleBoxes }, "Boxes");
  const tools = h("div", { class: "tools" }, legend, h("span", { class: "knobs" }, toggle,
    h("button", { type: "button", title: "Smaller (−)", "aria-label": "Smaller", onclick: () => zoom(view.zoom / 1.25) }, "−"),
    h("button", { type: "button", title: "Larger (+)", "aria-label": "Larger", onclick: () => zoom(view.zoom * 1.25) }, "+")));
  const scroll = h("div", { class: `scroll${view.boxes ? "" : " bare"}`, id: "paper", tabindex: "0", role: "region", "aria-label": "Picture of the page" }, sheet);
  return h("section", { class: "pane paper", "aria-label": "Page" }, tools, scroll);
}

function place_(element, [x0, y0, x1, y1], above = 1) {
  Object.assign(element.style, { left: `${x0}%`, top: `${y0}%`, width: `${x1 - x0}%`, height: `${y1 - y0}%` });
  // Small boxes lie above large ones, so that each can be reached.
  element.style.zIndex = above + Math.round(1000 - Math.min(999, ((x1 - x0) * (y1 - y0)) / 10));
  return element;
}

function boxOf(block, i) {
  const box = h("button", { type: "button", class: `box g-${groupOf(block.label)}`, "data-i": i, "aria-label": `Block ${i + 1}, ${block.label}` }, h("span", { class: "n", "aria-hidden": "true" }, String(i + 1)));
  box.addEventListener("mouseenter", () => warm(i, true));
  box.addEventListener("mouseleave", () => warm(i, false));
  box.addEventListener("focus", () => warm(i, true));
  box.addEventListener("blur", () => warm(i, false));
  box.addEventListener("click", () => choose(i, "text"));
  box.classList.toggle("tight", block.box[0] < 3);
  return place_(box, block.box);
}

const twins = (i) => document.querySelectorAll(`[data-i="${i}"]`);

function warm(i, on) {
  for (const element of twins(i)) element.classList.toggle("hot", on);
}

/** Chooses a block: it is marked on both sides, and the other side goes to it. */
function choose(i, towards) {
  for (const element of document.querySelectorAll(".chosen")) element.classList.remove("chosen");
  view.chosen = i;
  for (const element of twins(i)) {
    element.classList.add("chosen");
    const isBox = element.classList.contains("box");
    if (towards === "both" || isBox === (towards === "box")) scrollTo_(element);
  }
  tell(`Block ${i + 1}, ${view.page.blocks[i].label}`);
}

/** Brings an element into its own pane, without moving what lies around that. */
function scrollTo_(element) {
  const pane = element.closest(".scroll");
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth";
  if (pane && pane.scrollHeight > pane.clientHeight + 1 && getComputedStyle(pane).overflowY !== "visible") {
    const offset = element.getBoundingClientRect().top - pane.getBoundingClientRect().top;
    const room = Math.max(20, (pane.clientHeight - element.offsetHeight) / 3);
    pane.scrollTo({ top: pane.scrollTop + offset - room, behavior: still });
  } else element.scrollIntoView({ block: "center", behavior: still });
}

function toggleBoxes() {
  view.boxes = !view.boxes;
  $("paper").classList.toggle("bare", !view.boxes);
  $("boxes").setAttribute("aria-pressed", String(view.boxes));
}

function zoom(to) {
  view.zoom = Math.min(6, Math.max(0.4, to));
  const sheet = $("sheet");
  if (sheet) sheet.style.width = `${100 * view.zoom}%`;
}

// The tabs beside the page

function tabs() {
  const { page } = view;
  const all = [["text", "Text"], ["markdown", "Markdown"], ["html", "Raw HTML"], ["json", "JSON"], ["attempts", `Attempts ${page.attempts.length}`]];
  const counts = [page, page.other].filter((side) => side?.tests).map(({ tests }) =>
    (tests.some((test) => test.passed !== null) ? `${tests.filter((test) => test.passed).length}/${tests.length}` : String(tests.length)));
  if (counts.length) all.splice(1, 0, ["tests", `Tests ${counts.join(" ↔ ")}`]);
  return all;
}

function readingPane(place) {
  const all = tabs();
  if (view.tab === null) view.tab = run.scored === "tests" ? "tests" : "text";
  if (!all.some(([name]) => name === view.tab)) view.tab = "text";
  const list = h("div", { class: "tabs", role: "tablist", "aria-label": "What was read" }, ...all.map(([name, label]) =>
    h("button", { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": "panel", "data-tab": name, onclick: () => openTab(name), onkeydown: moveTab }, label)));
  const panel = h("div", { class: "scroll", id: "panel", role: "tabpanel", tabindex: "0" });
  return h("section", { class: "pane reading", "aria-label": "Reading" }, list, panel);
}

function openTab(name) {
  view.tab = name;
  drawTab(readPlace());
}

function moveTab(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  event.stopPropagation();
  const all = tabs().map(([name]) => name);
  openTab(all[(all.indexOf(view.tab) + step + all.length) % all.length]);
  $(`tab-${view.tab}`).focus();
}

function drawTab(place) {
  for (const tab of document.querySelectorAll("[role=tab]")) {
    const on = tab.dataset.tab === view.tab;
    tab.setAttribute("aria-selected", String(on));
    tab.tabIndex = on ? 0 : -1;
  }
  const panel = $("panel");
  panel.setAttribute("aria-labelledby", `tab-${view.tab}`);
  panel.className = `scroll is-${view.tab}`;
  const draw = { text: drawText, tests: drawTests, markdown: (page) => source(page.md), html: (page) => source(page.raw, true), json: (page) => source(readable(page.json)), attempts: drawAttempts }[view.tab];
  const both = view.page.other && view.tab !== "tests";
  panel.replaceChildren(...(both ? [half(run.name, view.page, draw, true), half(run.other, view.page.other, draw, false)] : [draw(view.page, true)]));
  panel.classList.toggle("two", Boolean(both));
  panel.scrollTop = 0;
  view.difference = null;
  wrapWideMaths();
  if (place.q && view.tab === "text") showHits(place.q);
}

/** Formulas that are wider than the page scroll by themselves. */
function wrapWideMaths() {
  for (const maths of document.querySelectorAll("#panel .reply math")) {
    const room = maths.closest(".wide, .reply");
    if (room.className !== "reply" || maths.getBoundingClientRect().width <= room.clientWidth) continue;
    const wrap = h("span", { class: "wide maths", tabindex: "0", role: "group", "aria-label": "Formula" });
    maths.replaceWith(wrap);
    wrap.append(maths);
  }
}

/** Goes to the next place that differs, in this run's text and then in the other's. */
function toDifference(step) {
  const marks = [...document.querySelectorAll("#panel .half mark")];
  if (!marks.length) return say("No word differs on this page");
  const at = view.difference === null ? (step > 0 ? 0 : marks.length - 1) : (view.difference + step + marks.length) % marks.length;
  document.querySelector("mark.now")?.classList.remove("now");
  marks[at].classList.add("now");
  scrollTo_(marks[at]);
  view.difference = at;
  tell(`Difference ${at + 1} of ${marks.length}: ${marks[at].textContent}`);
}

function half(name, page, draw, ours) {
  const count = view.tab === "text" && page.differs ? h("span", { class: "count" }, ` ${many(page.differs, "word")} only here`) : null;
  const next = view.tab === "text" && ours && (page.differs || page.other.differs)
    ? h("button", { type: "button", id: "next-difference", title: "Next difference (d)", onclick: () => toDifference(1) }, "next difference") : null;
  return h("div", { class: "half" }, h("h2", { dir: "auto" }, name, " ", page.status === "ok" ? null : badge(page.status), count, next),
    page.error && !ours ? h("p", { class: "reasons", dir: "auto" }, page.error) : null, draw(page, ours));
}

function drawText(page, ours) {
  const text = h("div", { class: "text" });
  page.notes.forEach((note) => text.append(h("p", { class: "note", dir: "auto" }, note)));
  page.blocks.forEach((block, i) => text.append(textBlock(block, i, ours, page.images)));
  if (!page.blocks.length) text.append(h("p", { class: "empty" }, page.raw ? "Nothing in the reply can be shown as text." : "There is no reply."));
  return text;
}

function textBlock(block, i, ours, images) {
  const body = h("div", { class: "reply", dir: "auto" });
  const template = h("template");
  template.innerHTML = block.html; // sanitized by view.py; the policy of this page lets nothing in it run
  for (const image of template.content.querySelectorAll("img")) {
    const words = () => h("span", { class: "alt" }, image.alt || "a picture without words");
    if (!image.hasAttribute("src")) image.replaceWith(words());
    else image.src = images + image.getAttribute("src").split("/").at(-1);
    image.addEventListener("error", () => image.replaceWith(words()));
  }
  body.append(template.content);
  if (!body.textContent.trim() && !body.querySelector("img, table")) body.append(h("span", { class: "alt" }, block.label === "Blank-Page" ? "a blank page" : "nothing was read here"));
  for (const table of body.querySelectorAll("table")) {
    const wrap = h("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Table" });
    table.replaceWith(wrap);
    wrap.append(table);
  }
  const chip = h("button", { type: "button", class: "mark", title: "Show it on the page", onclick: () => ours && choose(i, "box") }, h("span", { class: "n" }, String(i + 1)), ` ${block.label}`);
  const element = h("article", { class: `block g-${groupOf(block.label)}`, "aria-label": `Block ${i + 1}, ${block.label}` }, chip, body);
  if (!ours && block.box) {
    const ghost = h("span", { class: `box ghost g-${groupOf(block.label)}` });
    element.addEventListener("mouseenter", () => $("sheet").append(place_(ghost, block.box, 2000)));
    element.addEventListener("mouseleave", () => ghost.remove());
  }
  if (ours) {
    element.dataset.i = i;
    element.addEventListener("mouseenter", () => warm(i, true));
    element.addEventListener("mouseleave", () => warm(i, false));
    element.addEventListener("click", (event) => {
      if (!event.target.closest("a, button") && getSelection().isCollapsed) choose(i, "box");
    });
  }
  return element;
}

/** Marks the searched words in the text, and the boxes that hold them. */
function showHits(query) {
  const words = queryWords(query).map(([word]) => word);
  const ranges = [];
  for (const block of document.querySelectorAll("#panel .block")) {
    const nodes = document.createTreeWalker(block.querySelector(".reply"), NodeFilter.SHOW_TEXT);
    let hit = false;
    while (nodes.nextNode()) {
      for (const match of nodes.currentNode.data.matchAll(LETTERS)) {
        if (!words.some((word) => folded(match[0]).includes(word))) continue;
        const range = document.createRange();
        range.setStart(nodes.currentNode, match.index);
        range.setEnd(nodes.currentNode, match.index + match[0].length);
        ranges.push(range);
        hit = true;
      }
    }
    if (hit && block.dataset.i) for (const element of twins(block.dataset.i)) element.classList.add("hit");
  }
  if (window.CSS?.highlights) CSS.highlights.set("hits", new Highlight(...ranges));
  const first = ranges[0]?.startContainer.parentElement?.closest(".block");
  if (first) scrollTo_(first);
}

function source(text, coloured = false) {
  const pre = h("pre", { class: "source", dir: "auto" });
  if (coloured) pre.append(...tagged(text));
  else pre.textContent = text || "(empty)";
  const copy = h("button", { type: "button", class: "copy", onclick: () => copyText(text, copy, pre) }, "Copy");
  return h("div", { class: "sourcebox" }, copy, pre);
}

/** JSON over lines, but lists of numbers, as boxes are, on one. */
function readable(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2).replace(/\[\n[\d\s.,eE+-]*\]/g, (list) => list.replace(/\s+/g, " ").replace("[ ", "[").replace(" ]", "]"));
  } catch {
    return text; // cut off where it is too long
  }
}

function tagged(text) {
  return text.split(/(<[^<>]{1,2000}>)/).map((part, i) => (i % 2 ? h("span", { class: "tag" }, part) : part));
}

async function copyText(text, button, pre) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    getSelection().selectAllChildren(pre);
    document.execCommand("copy");
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

function table(head, rows) {
  return h("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Table" }, h("table", {},
    h("thead", {}, h("tr", {}, ...head.map((cell) => h("th", { scope: "col" }, cell)))),
    h("tbody", {}, ...rows.map(([attributes, ...cells]) => h("tr", attributes, ...cells.map((cell) => h("td", { dir: "auto" }, cell ?? "")))))));
}

function drawAttempts(page) {
  const rows = page.attempts.map((attempt, i) => [{ class: i === page.kept ? "kept" : "" }, `${i + 1}${i === page.kept ? " (kept)" : ""}`,
    String(attempt.temperature ?? ""), String(attempt.seed ?? ""), String(attempt.finish_reason ?? ""), number.format(attempt.completion_tokens ?? 0),
    `${Number(attempt.seconds ?? 0).toFixed(1)} s`, attempt.repeats ? "repeats itself" : ""]);
  const lists = [["Reasons", page.reasons], ["Notes", page.notes], ["Error", page.error ? [page.error] : []]];
  return h("div", { class: "text" },
    rows.length ? table(["Attempt", "Temperature", "Seed", "Ended by", "Tokens", "Time", "Note"], rows) : h("p", { class: "empty" }, "No attempt has a reply."),
    ...lists.filter(([, items]) => items.length).flatMap(([title, items]) => [h("h2", {}, title), h("ul", {}, ...items.map((item) => h("li", { dir: "auto" }, item)))]));
}

const resultOf = (test) => (!test ? "not there" : test.passed === null ? "not scored" : test.passed ? "passed" : "failed");

/** A page's tests: those that one of two runs passes and the other does not first, then those that failed. */
function drawTests(page) {
  const theirs = new Map((page.other?.tests || []).map((test) => [test.id, test]));
  const pairs = (page.tests || []).map((test) => [test, theirs.get(test.id)]);
  const known = new Set(pairs.map(([test]) => test.id));
  for (const test of theirs.values()) if (!known.has(test.id)) pairs.push([null, test]);
  const two = Boolean(page.other?.tests);
  const differs = ([a, b]) => two && a && b && a.passed !== b.passed;
  const rank = (pair) => (differs(pair) ? 0 : pair.some((test) => test?.passed === false) ? 1 : 2);
  const order = pairs.map((pair) => [rank(pair), pair]).sort((a, b) => a[0] - b[0]);
  return h("ul", { class: "tests" }, ...order.map(([place, pair]) => testItem(pair, two, place === 0)));
}

function testItem([ours, theirs], two, differs) {
  const test = ours || theirs;
  const sides = two ? [[run.name, ours], [run.other, theirs]] : [["", ours]];
  const failed = sides.some(([, side]) => side?.passed === false);
  const badges = sides.flatMap(([name, side]) => {
    const result = resultOf(side);
    return [h("span", { class: `badge ${{ passed: "ok", failed: "failed" }[result] || ""}`, dir: "auto" }, name ? `${name}: ${result}` : result), " "];
  });
  return h("li", { class: `test${failed ? " failed" : ""}${differs ? " differs" : ""}` },
    h("p", {}, ...badges, h("strong", {}, test.type), h("span", { class: "soft" }, ` ${test.id}`)),
    test.asked ? h("p", { dir: "auto" }, test.asked) : null,
    ...sides.map(([name, side]) => (side?.why ? h("p", { class: "why", dir: "auto" }, name ? `${name}: ${side.why}` : side.why) : null)),
    test.tags.length ? h("p", { class: "soft" }, test.tags.join(" · ")) : null);
}

/** Formulas are copied as the LaTeX that was read. */
document.addEventListener("copy", (event) => {
  const selection = getSelection();
  const part = selection.rangeCount ? selection.getRangeAt(0).cloneContents() : null;
  if (!part?.querySelector("math")) return;
  for (const maths of part.querySelectorAll("math")) {
    const sign = maths.getAttribute("display") === "block" ? "$$" : "$";
    maths.replaceWith(`${sign}${maths.getAttribute("alttext")}${sign}`);
  }
  const holder = h("div", { class: "unseen" }, part);
  document.body.append(holder);
  event.clipboardData.setData("text/plain", holder.innerText);
  holder.remove();
  event.preventDefault();
});

// ---- Keys, theme, start

const THEMES = { auto: "◐", light: "☀", dark: "☾" };

function theme(change) {
  const names = Object.keys(THEMES);
  let now = "auto";
  try { now = localStorage.getItem("ocr-theme") || "auto"; } catch { /* a browser may keep nothing for files */ }
  if (!THEMES[now]) now = "auto";
  if (change) {
    now = names[(names.indexOf(document.documentElement.dataset.theme || now) + 1) % names.length];
    try { localStorage.setItem("ocr-theme", now); } catch { /* the same */ }
  }
  document.documentElement.dataset.theme = now;
  $("theme").textContent = THEMES[now];
  $("theme").setAttribute("aria-label", `Theme: ${now}`);
}

function stepBlock(step) {
  const blocks = view.page?.blocks.length || 0;
  if (blocks) choose(((view.chosen ?? (step > 0 ? -1 : 0)) + step + blocks) % blocks, "both");
}

const onPage = {
  ArrowRight: () => $("next").href && $("next").click(),
  ArrowLeft: () => $("previous").href && $("previous").click(),
  s: () => toDoubtful(1),
  S: () => toDoubtful(-1),
  j: () => stepBlock(1),
  k: () => stepBlock(-1),
  d: () => toDifference(1),
  D: () => toDifference(-1),
  b: toggleBoxes,
  "+": () => zoom(view.zoom * 1.25),
  "=": () => zoom(view.zoom * 1.25),
  "-": () => zoom(view.zoom / 1.25),
  0: () => zoom(1),
  Escape: () => $("back").click(),
};
const anywhere = { "/": () => $("query").select(), t: () => theme(true), "?": () => $("help").showModal() };

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
  if (event.target.closest("input, select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const isPage = document.body.classList.contains("page");
  const tab = isPage && /^[1-6]$/.test(event.key) ? tabs()[Number(event.key) - 1] : null;
  const act = tab ? () => openTab(tab[0]) : (isPage && onPage[event.key]) || anywhere[event.key];
  if (!act) return;
  event.preventDefault();
  act();
});

async function show() {
  const turn = ++drawing;
  const place = readPlace();
  if (document.activeElement !== $("query")) $("query").value = place.q;
  CSS.highlights?.delete("hits");
  const from = document.activeElement?.dataset?.show;
  await (place.page === null ? showList(place, turn) : showPage(place, turn));
  if (turn !== drawing) return;
  if (from) document.querySelector(`[data-show="${CSS.escape(from)}"]`)?.focus();
  document.documentElement.dataset.ready = String(turn);
}

/** A list that is come back to is where it was left. */
const places = new Map();

let typing;
$("query").addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(() => go({ q: $("query").value, page: null, show: "all" }), 200);
});
$("search").addEventListener("submit", (event) => {
  event.preventDefault();
  clearTimeout(typing);
  go({ q: $("query").value, page: null, show: "all" });
});
$("theme").addEventListener("click", () => theme(true));
$("keys").addEventListener("click", () => $("help").showModal());
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
addEventListener("resize", wrapWideMaths);
let shownAt = location.hash;
addEventListener("hashchange", async () => {
  places.set(shownAt, scrollY);
  shownAt = location.hash;
  const back = places.get(shownAt);
  await show();
  scrollTo(0, document.body.classList.contains("page") ? 0 : back || 0);
});

theme(false);
load("run").then((value) => {
  run = value;
  if (!run) return main.replaceChildren(h("p", { class: "empty" }, "data/run.js is missing. Run view.py again."));
  $("home").textContent = run.other ? `${run.name} ↔ ${run.other}` : run.name;
  return show();
});
