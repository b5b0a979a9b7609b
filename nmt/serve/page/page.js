// The server's page: text in, text out, while typing.
//
// The text is a list of lines; the server splits each into sentences. A line keeps its translation until it is changed,
// so only changed lines are asked for. Alternatives, attention and confidence are those of a sentence.
// A newer question aborts the older one, and what an aborted question brings is dropped: an older answer never replaces
// a newer one. All text of users and of the server is shown through textContent; nothing here writes HTML or a style
// attribute, so that the page works under the server's Content-Security-Policy. It talks to its own server only.

import { askServer, isAboutKey, isRefused, ServerProblem } from "./server.js";
import { compareWords, splitIntoWords, weighSourceWords } from "./words.js";

const TYPING_PAUSE = 250; // milliseconds without a key before the text is translated
const HOVER_PAUSE = 80; // milliseconds on a word before its attention is asked for
const LINES_PER_QUESTION = 8; // long texts appear part by part
const N_ALTERNATIVES = 5;
const UNSURE = 0.5; // a piece less probable than this is underlined
const DOUBTFUL = 0.2;
const LONGEST_ANNOUNCEMENT = 400; // characters that a screen reader is given at once
const LOOKED_AT = 0.1; // a smaller share of attention is noise
const MOST_NAMED = 4; // source words, or pieces of a word, in the line of details

const page = Object.fromEntries([...document.querySelectorAll("[id]")].map((element) => [element.id, element]));

let models = []; // {name, source, target, engine}
let lines = []; // what makeLine returns, one for each line of the text
let current = null; // the line that the buttons are about,
let currentPlace = 0; // and the character of it: its sentence
let open = null; // {sentence, box} of the list of alternatives
let apiKey = null; // in memory only
let question = new AbortController(); // of the newest translation
let typingTimer = 0;
let retryTimer = 0;
let hoverTimer = 0;
let lookedAt = null; // the word whose attention is shown
const lineOfRow = new WeakMap();
const sentenceOfElement = new WeakMap();
const wordOfCell = new WeakMap();

// --- the text and its lines ---

function makeLine(source) {
  const row = makeElement("div", "line");
  row.setAttribute("role", "row");
  const line = {
    source,
    copy: makeElement("div", "source-line", source), // behind the text field
    row,
    sentences: [], // what makeSentence returns
    tail: "", // white space after the last one
    isTranslated: false, // otherwise its sentences are of what the line was before
    refusal: null, // why the server does not translate it
  };
  lineOfRow.set(row, line);
  return line;
}

// `start` is its place in the line, `gap` the white space before its translation, `shown` a candidate, `search` how that
// was found, and `map` a promise of its attention.
function makeSentence(line, source, start, gap, shown, search) {
  const sentence = { line, source, start, gap, shown, search, map: null, element: makeElement("span", "sentence") };
  sentenceOfElement.set(sentence.element, sentence);
  return sentence;
}

function isEmpty(line) {
  return line.source.trim() === "";
}

function isWaiting(line) {
  return !isEmpty(line) && line.refusal === null && !line.isTranslated;
}

function writeTranslation(line) {
  if (isEmpty(line)) return line.source;
  return line.sentences.map(({ gap, shown }) => gap + writeOnOneLine(shown)).join("") + line.tail;
}

function writeOnOneLine(candidate) {
  return candidate.text.replaceAll("\n", " "); // as the server joins sentences
}

// Lines at the start and the end that are what they were keep their translations. A changed line between them shows the
// old one, faded, until the new one is there.
function matchLines(sources, before) {
  const shorter = Math.min(sources.length, before.length);
  let nFirst = 0;
  while (nFirst < shorter && sources[nFirst] === before[nFirst].source) nFirst += 1;
  let nLast = 0;
  while (nLast < shorter - nFirst && sources.at(-1 - nLast) === before.at(-1 - nLast).source) nLast += 1;

  const first = before.slice(0, nFirst);
  const last = before.slice(before.length - nLast);
  const old = before.slice(nFirst, before.length - nLast);
  const changed = sources.slice(nFirst, sources.length - nLast).map((source, i) => changeLine(old[i], source));
  return [...first, ...changed, ...last];
}

function changeLine(old, source) {
  const line = makeLine(source);
  if (old && !isEmpty(line)) {
    line.sentences = old.sentences;
    for (const sentence of line.sentences) sentence.line = line;
  }
  return line;
}

function readText() {
  lines = matchLines(page.source.value.split("\n"), lines);
  const hasText = lines.some((line) => !isEmpty(line));
  page.result.hidden = !hasText;
  page.placeholder.hidden = hasText;
  page.clear.hidden = page.source.value === "";
  for (const element of [page.source, page.backdrop, page.result]) {
    element.classList.toggle("numbered", lines.length > 1);
  }
  lines.filter((line) => !line.row.hasChildNodes()).forEach(drawLine); // the others are as they were
  placeChildren(page.result, lines.map((line) => line.row));
  placeChildren(page.backdrop, lines.map((line) => line.copy));
  chooseLineAtCaret();
  alignRows();
}

// Elements that are there already stay untouched: laying out a long text anew for each key takes too long.
function placeChildren(parent, children) {
  const wanted = new Set(children);
  for (const child of [...parent.children]) {
    if (!wanted.has(child)) child.remove();
  }
  let next = parent.firstChild;
  for (const child of children) {
    if (child === next) next = next.nextSibling;
    else parent.insertBefore(child, next);
  }
}

function readTextAndWait() {
  readText();
  question.abort(); // it asked about a text that is no longer there
  page.working.hidden = !lines.some(isWaiting);
  clearTimeout(typingTimer);
  typingTimer = setTimeout(translateWaiting, TYPING_PAUSE);
}

function forgetTranslations() {
  lines = [];
  readText();
  translateWaiting();
}

// --- translating ---

async function translateWaiting() {
  if (models.length === 0) return; // as soon as they are known, it is called again
  clearTimeout(typingTimer);
  clearTimeout(retryTimer);
  question.abort();
  question = new AbortController();
  const { signal } = question;
  const waiting = lines.filter(isWaiting);
  page.working.hidden = waiting.length === 0;
  try {
    for (let i = 0; i < waiting.length; i += LINES_PER_QUESTION) {
      await translateGroup(waiting.slice(i, i + LINES_PER_QUESTION), signal);
    }
    if (signal.aborted) return;
    showProblem(null);
    announceLines(waiting);
  } catch (error) {
    if (signal.aborted) return;
    showProblem(error);
  }
  page.working.hidden = true;
}

async function translateGroup(group, signal) {
  let answer;
  try {
    answer = await askForTranslations(group.map((line) => line.source), {}, signal);
  } catch (error) {
    if (signal.aborted || !isRefused(error)) throw error;
    await refuseGroup(group, error, signal);
    return;
  }
  if (signal.aborted) return;
  group.forEach((line, i) => showTranslation(line, answer[i]));
  alignRows();
}

// One line that the server refuses must not cost its neighbours their translation: each is asked for by itself.
async function refuseGroup(group, error, signal) {
  if (group.length === 1) {
    group[0].sentences = [];
    group[0].refusal = error.message.replace(/^q: line 1\b/, "this line"); // it was the only one
    drawLine(group[0]);
    updateActions();
    alignRows();
    return;
  }
  for (const line of group) await translateGroup([line], signal);
}

// Returns the translation of each text: its `text`, and the candidates of each of its `sentences`, best first.
async function askForTranslations(texts, search, signal) {
  const body = { q: texts, model: page.model.value, pieces: isExplained(), ...search };
  if (apiKey !== null) body.api_key = apiKey;
  const found = (await askServer("v1/translate", body, signal))?.translations;
  const isWhole = ({ sentences }) => sentences?.every(({ candidates }) => candidates?.length > 0);
  if (found?.length !== texts.length || !found.every(isWhole)) {
    throw new ServerProblem("The server's answer makes no sense.", 0);
  }
  return found;
}

async function askForCandidates(sentence, search) {
  const [translation] = await askForTranslations([sentence.source], { ...search, split: false }, null);
  return translation.sentences[0].candidates;
}

// Sentences that are what they were keep what was chosen for them.
function showTranslation(line, { text, sentences }) {
  const before = new Map(line.sentences.map((sentence) => [sentence.source, sentence]));
  const characters = [...line.source]; // the server counts an emoji as one
  line.tail = text;
  line.sentences = sentences.map(({ source, start, candidates }) => {
    const best = writeOnOneLine(candidates[0]);
    const gap = line.tail.slice(0, Math.max(0, line.tail.indexOf(best)));
    line.tail = line.tail.slice(gap.length + best.length);
    const { shown, search } = before.get(source) ?? { shown: candidates[0], search: {} };
    return makeSentence(line, source, characters.slice(0, start).join("").length, gap, shown, search);
  });
  line.isTranslated = true;
  drawLine(line);
  updateActions();
}

function announceLines(translated) {
  if (translated.length === 0) return;
  const text = translated.map((line) => line.refusal ?? writeTranslation(line)).join("\n");
  const isShort = text.length <= LONGEST_ANNOUNCEMENT;
  announce(isShort ? text : `${translated.length} lines translated`);
}

// --- drawing lines ---

function makeElement(name, className = "", text = "") {
  const element = document.createElement(name);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}

function makeCell(className, text = "") {
  const cell = makeElement("span", className, text);
  cell.setAttribute("role", "gridcell");
  return cell;
}

function drawLine(line) {
  const hadFocus = line.row.contains(document.activeElement);
  line.sentences.forEach(drawSentence);
  line.row.replaceChildren(...listContent(line));
  line.row.classList.toggle("stale", !line.isTranslated && line.sentences.length > 0);
  if (hadFocus) line.row.querySelector(".word")?.focus();
}

function listContent(line) {
  if (isEmpty(line)) return [describeCell(makeCell("nothing"), "empty line")];
  if (line.refusal !== null) return [makeCell("refusal", `Not translated: ${line.refusal}`)];
  if (isWaiting(line) && line.sentences.length === 0) {
    return [describeCell(makeCell("nothing", "…"), "not translated yet")];
  }
  return [...line.sentences.flatMap(({ gap, element }) => [gap, element]), line.tail];
}

function drawSentence(sentence) {
  const cells = [];
  for (const word of splitIntoWords(sentence.shown)) {
    if (word.isSpaced && cells.length > 0) cells.push(" ");
    cells.push(drawWord(word));
  }
  sentence.element.replaceChildren(...cells);
}

function describeCell(cell, label) {
  cell.setAttribute("aria-label", label);
  return cell;
}

function drawWord(word) {
  const cell = makeCell("word");
  cell.tabIndex = -1;
  cell.replaceChildren(...word.parts.map(drawPart));
  if (word.probability !== null) cell.setAttribute("aria-description", `probability ${percent(word.probability)}`);
  wordOfCell.set(cell, word);
  return cell;
}

function drawPart(part) {
  const element = makeElement("span", "part", part.text);
  if (part.probability === null) return element;
  if (part.probability < DOUBTFUL) element.classList.add("doubtful");
  else if (part.probability < UNSURE) element.classList.add("unsure");
  return element;
}

function percent(probability) {
  return probability < 0.01 ? "below 1 %" : `${Math.round(100 * probability)} %`;
}

// Where the panes are side by side, a row begins no higher than its line of the source.
function alignRows() {
  const isWide = page.source.getBoundingClientRect().right <= page.result.getBoundingClientRect().left;
  const measure = (element) => element.getBoundingClientRect().height; // offsetHeight rounds, and that adds up
  const sourceHeights = lines.map((line) => measure(line.copy));
  const rowHeights = lines.map((line) => measure(line.row));
  let sourceTop = 0;
  let rowTop = 0;
  lines.forEach((line, i) => {
    const gap = isWide ? Math.max(0, sourceTop - rowTop) : 0;
    line.row.style.marginTop = gap > 0 ? `${gap}px` : "";
    sourceTop += sourceHeights[i];
    rowTop += gap + rowHeights[i];
  });
}

// --- the current line, and what can be done with it ---

function chooseLine(line, place = 0) {
  current = line;
  currentPlace = place;
  for (const other of lines) {
    const isCurrent = other === current && lines.length > 1;
    other.row.classList.toggle("current", isCurrent);
    other.copy.classList.toggle("current", isCurrent);
  }
  updateActions();
}

function chooseLineAtCaret() {
  const before = page.source.value.slice(0, page.source.selectionStart).split("\n");
  const line = lines[before.length - 1];
  if (line && !isEmpty(line)) chooseLine(line, before.at(-1).length);
  else chooseLine(lines.find((other) => !isEmpty(other)) ?? null);
}

function findCurrentSentence() {
  if (!current?.isTranslated) return null;
  return current.sentences.findLast(({ start }) => start <= currentPlace) ?? current.sentences[0] ?? null;
}

function updateActions() {
  const sentence = findCurrentSentence();
  page.alternatives.disabled = sentence === null;
  page.look.disabled = sentence === null;
  page.copy.disabled = !lines.some((line) => line.sentences.length > 0);
  page.result.querySelector(".sentence.current")?.classList.remove("current");
  if (current?.sentences.length > 1) sentence?.element.classList.add("current");
  const first = page.result.querySelector(".word");
  if (first && !page.result.querySelector('.word[tabindex="0"]')) setTabStop(first);
}

function nameSentence(sentence) {
  const { sentences } = sentence.line;
  const line = lines.length > 1 ? `line ${lines.indexOf(sentence.line) + 1}` : "the line";
  return sentences.length > 1 ? `sentence ${sentences.indexOf(sentence) + 1} of ${line}` : line;
}

async function copyTranslation() {
  const text = lines.map(writeTranslation).join("\n");
  let message = "Not translated yet";
  if (!lines.some(isWaiting)) {
    message = (await writeToClipboard(text)) ? "Copied" : "Not copied: the browser forbids it";
  }
  page.copy.textContent = message;
  announce(message);
  setTimeout(() => { page.copy.textContent = "Copy"; }, 1500);
}

async function writeToClipboard(text) {
  try {
    await navigator.clipboard.writeText(text); // only on https and on this machine
    return true;
  } catch {
    return copyBySelection(text);
  }
}

function copyBySelection(text) {
  const focused = document.activeElement;
  const field = makeElement("textarea", "visually-hidden");
  field.value = text;
  document.body.append(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  focused?.focus();
  return isCopied;
}

// --- alternatives ---

// Someone who points keeps the focus on the word, and so sees its attention beside the alternatives.
async function toggleAlternatives(sentence, takesFocus = true) {
  const wasOpen = open?.sentence === sentence;
  closeAlternatives();
  if (wasOpen || !sentence?.line.isTranslated || !isExplained()) return;
  chooseLine(sentence.line, sentence.start);
  const box = makeCell("alternatives", "Looking for alternatives …");
  open = { sentence, box };
  sentence.line.row.append(box);
  alignRows();
  try {
    const search = { n_best: N_ALTERNATIVES, beam: N_ALTERNATIVES };
    const candidates = await askForCandidates(sentence, search);
    if (open?.box === box) listAlternatives(sentence, candidates, search, takesFocus);
  } catch (error) {
    if (open?.box === box) box.textContent = `No alternatives: ${error.message}`;
    if (isAboutKey(error)) showProblem(error);
  }
}

function listAlternatives(sentence, candidates, search, takesFocus) {
  const list = makeElement("ul");
  list.setAttribute("role", "listbox");
  list.setAttribute("aria-label", `Alternatives of ${nameSentence(sentence)}`);
  const choices = [{ candidate: sentence.shown, search: sentence.search }];
  for (const candidate of candidates) {
    const isNew = choices.every((choice) => choice.candidate.text !== candidate.text);
    if (isNew) choices.push({ candidate, search });
  }
  list.replaceChildren(...choices.map((choice) => drawChoice(sentence, choice)));
  open.box.replaceChildren(list);
  alignRows();
  announce(`${choices.length - 1} alternatives`);
  const first = list.children[Math.min(1, choices.length - 1)];
  first.tabIndex = 0;
  if (takesFocus) first.focus();
}

function drawChoice(sentence, { candidate, search }) {
  const choice = makeElement("li");
  const isShown = candidate === sentence.shown;
  choice.setAttribute("role", "option");
  choice.setAttribute("aria-selected", String(isShown));
  choice.tabIndex = -1;
  compareWords(candidate.text, sentence.shown.text).forEach(({ text, isNew }, i) => {
    choice.append(i > 0 ? " " : "", isNew ? makeElement("b", "", text) : text);
  });
  choice.addEventListener("click", () => {
    if (!isShown) showCandidate(sentence, candidate, search);
    closeAlternatives(); // aligns the rows
    sentence.element.querySelector(".word")?.focus();
    if (!isShown) announce(`${nameSentence(sentence)} is now: ${candidate.text}`);
  });
  return choice;
}

function showCandidate(sentence, candidate, search) {
  Object.assign(sentence, { shown: candidate, search, map: null });
  drawSentence(sentence);
  updateActions();
}

function focusChoice(choice) {
  for (const other of choice.parentElement.children) other.tabIndex = other === choice ? 0 : -1;
  choice.focus();
}

function closeAlternatives() {
  open?.box.remove();
  open = null;
  alignRows();
}

// --- attention ---

// The map of what is shown, as the server's `attention` has it. A chosen alternative is found by its text in the search
// that found it.
function loadMap(sentence) {
  sentence.map ??= askForMap(sentence, sentence.shown);
  return sentence.map;
}

async function askForMap(sentence, shown) {
  try {
    const candidates = await askForCandidates(sentence, { ...sentence.search, attention: true });
    const candidate = candidates.find((other) => other.text === shown.text);
    if (!candidate?.attention) throw new ServerProblem("the server did not send it", 0);
    return candidate.attention;
  } catch (error) {
    sentence.map = null; // the next time it is asked for again
    throw error;
  }
}

async function showFullAttention(sentence) {
  if (!sentence?.line.isTranslated) return;
  page.attentionTitle.textContent = `Attention of ${nameSentence(sentence)}`;
  page.attentionView.textContent = "Asking the server …";
  page.attention.showModal();
  try {
    const map = await loadMap(sentence);
    page.attentionView.textContent = "";
    window.nmtAttention.show(page.attentionView, map);
  } catch (error) {
    page.attentionView.textContent = `No attention: ${error.message}`;
  }
}

// Shows for a word what it looks at: in the source, in the line of details, and to a screen reader if it has the focus.
async function lookAtWord(cell) {
  if (!cell.isConnected) return; // a new translation has come meanwhile
  const sentence = findSentence(cell);
  const word = wordOfCell.get(cell);
  lookedAt = cell;
  page.detail.textContent = describeWord(word, []);
  const pieces = word.parts.flatMap((part) => part.pieces);
  if (!sentence.line.isTranslated || pieces.length === 0) return;
  let map;
  try {
    map = await loadMap(sentence);
  } catch {
    return; // the details say nothing of attention then; the button tells why
  }
  if (lookedAt !== cell) return;
  const sources = weighSourceWords(sentence.source, map, pieces);
  showAttentionInSource(sentence, sources);
  page.detail.textContent = describeWord(word, sources);
  if (document.activeElement === cell) announce(page.detail.textContent);
}

function stopLooking() {
  clearTimeout(hoverTimer);
  lookedAt = null;
  page.detail.textContent = "";
  showAttentionInSource(null);
}

function describeWord(word, sources) {
  const facts = [];
  const looked = chooseLookedAt(sources).sort((a, b) => b.weight - a.weight).slice(0, MOST_NAMED);
  if (looked.length > 0) {
    facts.push(`looks at ${looked.map(({ text, weight }) => `${isolate(text)} ${percent(weight)}`).join(" · ")}`);
  }
  if (word.probability !== null && page.confidence.checked) {
    facts.push(`probability ${percent(word.probability)}${listParts(word.parts)}`);
  }
  return facts.length === 0 ? "" : `${isolate(word.text)}: ${facts.join("; ")}`;
}

// A word that is written from right to left must not turn what follows it.
function isolate(text) {
  return `\u2068${text}\u2069`;
}

function listParts(parts) {
  if (parts.length === 1) return "";
  const named = parts.slice(0, MOST_NAMED).map((part) => `${isolate(part.text)} ${percent(part.probability)}`);
  return ` (${named.join(" · ")}${parts.length > MOST_NAMED ? " …" : ""})`;
}

// What gets a notable share, and always what gets the most.
function chooseLookedAt(sources) {
  const highest = Math.max(...sources.map(({ weight }) => weight));
  return sources.filter(({ weight }) => weight >= Math.min(LOOKED_AT, highest));
}

function showAttentionInSource(sentence, words = []) {
  for (const element of page.backdrop.querySelectorAll(".looked-at")) {
    element.classList.remove("looked-at");
    element.replaceChildren(element.textContent); // without marks
  }
  if (sentence === null) return;
  const { line, start: first } = sentence;
  const children = [];
  let at = 0;
  for (const { start, end, text, weight } of chooseLookedAt(words)) {
    children.push(line.source.slice(at, first + start), makeElement("mark", nameWeight(weight), text));
    at = first + end;
  }
  line.copy.classList.add("looked-at");
  line.copy.replaceChildren(...children, line.source.slice(at));
}

function nameWeight(weight) {
  if (weight >= 0.4) return "strong";
  return weight >= 0.2 ? "medium" : "weak";
}

// --- keys and pointers in the translation ---

function listWords(row = page.result) {
  return [...row.querySelectorAll(".word")];
}

function findSentence(cell) {
  return sentenceOfElement.get(cell.parentElement);
}

// Tab reaches one word, the last one that had the focus.
function setTabStop(cell) {
  for (const other of page.result.querySelectorAll('.word[tabindex="0"]')) other.tabIndex = -1;
  cell.tabIndex = 0;
}

function moveFocus(cell, key) {
  const row = cell.closest(".line");
  const inRow = listWords(row);
  if (key === "Home") return inRow.at(0).focus();
  if (key === "End") return inRow.at(-1).focus();
  if (key === "ArrowUp" || key === "ArrowDown") {
    const rows = lines.map((line) => line.row).filter((other) => listWords(other).length > 0);
    const next = rows[rows.indexOf(row) + (key === "ArrowDown" ? 1 : -1)];
    const words = next ? listWords(next) : [];
    return words[Math.min(inRow.indexOf(cell), words.length - 1)]?.focus();
  }
  const isLeftToRight = getComputedStyle(row).direction === "ltr";
  const isForward = (key === "ArrowRight") === isLeftToRight;
  const all = listWords();
  return all[all.indexOf(cell) + (isForward ? 1 : -1)]?.focus();
}

function handleKeyOnWord(event, cell) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (/^(Arrow.*|Home|End)$/.test(event.key)) moveFocus(cell, event.key);
  else if (event.key === "Enter" || event.key === " ") toggleAlternatives(findSentence(cell));
  else if (event.key === "a" || event.key === "A") showFullAttention(findSentence(cell));
  else if (event.key === "c" || event.key === "C") copyTranslation();
  else if (event.key === "Escape") leaveWords();
  else return;
  event.preventDefault();
}

function leaveWords() {
  if (open?.box.isConnected) closeAlternatives();
  else page.source.focus();
}

function handleKeyOnChoice(event, choice) {
  const choices = [...choice.parentElement.children];
  const place = choices.indexOf(choice);
  const next = { ArrowDown: place + 1, ArrowUp: place - 1, Home: 0, End: choices.length - 1 }[event.key];
  if (next !== undefined) focusChoice(choices[Math.max(0, Math.min(next, choices.length - 1))]);
  else if (event.key === "Enter" || event.key === " ") choice.click();
  else if (event.key === "Escape") closeChoices();
  else return;
  event.preventDefault();
}

function closeChoices() {
  const { sentence } = open;
  closeAlternatives();
  sentence.element.querySelector(".word")?.focus();
}

function handleResultKey(event) {
  const choice = event.target.closest("[role=option]");
  if (choice) handleKeyOnChoice(event, choice);
  else if (event.target.matches(".word")) handleKeyOnWord(event, event.target);
}

function handleResultClick(event) {
  const cell = event.target.closest(".word");
  const row = event.target.closest(".line");
  if (!row || event.target.closest(".alternatives")) return;
  const sentence = cell && findSentence(cell);
  chooseLine(lineOfRow.get(row), sentence?.start);
  const isSelecting = !getSelection().isCollapsed; // the user marks text
  if (cell && !isSelecting) toggleAlternatives(sentence, false);
}

function handlePointerOver(event) {
  const cell = event.target.closest(".word");
  if (cell === lookedAt) return;
  clearTimeout(hoverTimer);
  if (cell) hoverTimer = setTimeout(() => lookAtWord(cell), HOVER_PAUSE);
}

function handleFocusIn(event) {
  const cell = event.target;
  if (!cell.matches(".word")) return;
  const { line, start } = findSentence(cell);
  chooseLine(line, start);
  setTabStop(cell);
  lookAtWord(cell);
}

function stopPointing() {
  const focused = document.activeElement;
  if (focused.matches(".word")) lookAtWord(focused);
  else stopLooking();
}

// --- problems ---

// Says what is wrong in plain words, and asks again by itself where that makes sense.
function showProblem(error) {
  clearTimeout(retryTimer);
  page.problem.hidden = error === null || isAboutKey(error);
  page.keyForm.hidden = error === null || !isAboutKey(error);
  if (error === null) return;
  if (isAboutKey(error)) {
    askForKey();
    return;
  }
  const isRetried = error.retryAfter > 0;
  const wait = error.retryAfter === 1 ? "1 second" : `${error.retryAfter} seconds`;
  page.problemText.textContent = isRetried ? `${error.message} Trying again in ${wait}.` : error.message;
  if (isRetried) retryTimer = setTimeout(tryAgain, 1000 * error.retryAfter);
}

function askForKey() {
  announce(apiKey === null ? "This server asks for an API key" : "The server does not accept this API key");
  page.key.setAttribute("aria-invalid", String(apiKey !== null));
  page.key.value = "";
}

function takeKey(event) {
  event.preventDefault();
  apiKey = page.key.value;
  page.keyForm.hidden = true;
  page.source.focus();
  tryAgain();
}

function tryAgain() {
  if (models.length === 0) start();
  else translateWaiting();
}

function announce(text) {
  page.status.textContent = text;
}

// --- models and languages ---

async function loadModels() {
  const answer = await askServer("v1/models");
  models = answer.models;
  page.model.replaceChildren(...models.map((model) => {
    const option = makeElement("option", "", nameModel(model));
    option.value = model.name;
    return option;
  }));
  page.modelChoice.hidden = models.length < 2;
  showModel();
}

function nameModel(model) {
  const pair = model.source && model.target ? `${nameLanguage(model.source)} → ${nameLanguage(model.target)}` : "";
  const isUnique = models.filter((other) => other.source === model.source && other.target === model.target).length === 1;
  if (pair === "") return model.name;
  return isUnique ? pair : `${pair} (${model.name})`;
}

function nameLanguage(code) {
  try {
    return new Intl.DisplayNames(["en"], { type: "language" }).of(code);
  } catch {
    return code; // not a code of BCP 47
  }
}

function findModel() {
  return models.find((model) => model.name === page.model.value);
}

// Other engines than the project's own give a translation and nothing else.
function isExplained() {
  return findModel()?.engine === "nmt";
}

function showModel() {
  const model = findModel();
  for (const id of ["alternatives", "look", "confidenceSwitch"]) page[id].hidden = !isExplained();
  showConfidence();
  page.sourceLanguage.textContent = model?.source ? nameLanguage(model.source) : "Text";
  page.targetLanguage.textContent = model?.target ? nameLanguage(model.target) : "Translation";
  setLanguage(page.source, model?.source);
  setLanguage(page.result, model?.target);
  page.source.dir = page.result.dir = page.backdrop.dir = "auto";
}

function setLanguage(element, code) {
  if (code) element.lang = code;
  else element.removeAttribute("lang");
}

// --- start ---

function listen() {
  page.source.addEventListener("input", readTextAndWait);
  page.source.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) translateWaiting();
  });
  page.source.addEventListener("focus", chooseLineAtCaret);
  document.addEventListener("selectionchange", () => {
    if (document.activeElement === page.source) chooseLineAtCaret();
  });
  page.result.addEventListener("keydown", handleResultKey);
  page.result.addEventListener("click", handleResultClick);
  page.result.addEventListener("pointerover", handlePointerOver);
  page.result.addEventListener("pointerleave", stopPointing);
  page.result.addEventListener("focusin", handleFocusIn);
  page.result.addEventListener("focusout", stopLooking);
  page.model.addEventListener("change", () => {
    showModel();
    forgetTranslations();
  });
  page.clear.addEventListener("click", clearText);
  page.copy.addEventListener("click", copyTranslation);
  page.alternatives.addEventListener("click", () => toggleAlternatives(findCurrentSentence()));
  page.look.addEventListener("click", () => showFullAttention(findCurrentSentence()));
  page.attentionClose.addEventListener("click", () => page.attention.close());
  page.confidence.addEventListener("change", showConfidence);
  page.tryAgain.addEventListener("click", tryAgain);
  page.keyForm.addEventListener("submit", takeKey);
  new ResizeObserver(alignRows).observe(page.source);
}

function clearText() {
  page.source.value = "";
  readTextAndWait();
  page.source.focus();
}

function showConfidence() {
  page.result.classList.toggle("with-confidence", page.confidence.checked);
  page.legend.hidden = !page.confidence.checked || !isExplained();
}

async function start() {
  try {
    await loadModels();
    showProblem(null);
  } catch (error) {
    showProblem(error);
    return;
  }
  readText(); // the browser may have kept text from before
  translateWaiting();
}

listen();
start();
