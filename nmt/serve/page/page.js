// The server's page: text in, text out, while typing.
//
// The text is a list of lines. Each keeps its translation until it is changed, so only changed lines are asked for.
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
let current = null; // the line that the buttons are about
let apiKey = null; // in memory only
let question = new AbortController(); // of the newest translation
let typingTimer = 0;
let retryTimer = 0;
let hoverTimer = 0;
let lookedAt = null; // the word whose attention is shown
const lineOfRow = new WeakMap();
const wordOfCell = new WeakMap();

// --- the text and its lines ---

function makeLine(source) {
  const row = makeElement("div", "line");
  row.setAttribute("role", "row");
  const line = {
    source,
    copy: makeElement("div", "source-line", source), // behind the text field
    row,
    shown: null, // a candidate
    isStale: false, // what is shown translates what the line was before
    refusal: null, // why the server does not translate it
    search: {}, // how what is shown was found
    alternatives: null, // the open list
    map: null, // a promise of the attention
  };
  lineOfRow.set(row, line);
  return line;
}

function isEmpty(line) {
  return line.source.trim() === "";
}

function isWaiting(line) {
  return !isEmpty(line) && line.refusal === null && (line.shown === null || line.isStale);
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
  if (old?.shown && !isEmpty(line)) {
    line.shown = old.shown;
    line.isStale = true;
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
    answer = await askForCandidates(group, {}, signal);
  } catch (error) {
    if (signal.aborted || !isRefused(error)) throw error;
    await refuseGroup(group, error, signal);
    return;
  }
  if (signal.aborted) return;
  group.forEach((line, i) => showCandidate(line, answer[i][0]));
  alignRows();
}

// One line that the server refuses must not cost its neighbours their translation: each is asked for by itself.
async function refuseGroup(group, error, signal) {
  if (group.length === 1) {
    group[0].refusal = error.message.replace(/^q: line 1\b/, "this line"); // it was the only one
    drawLine(group[0]);
    updateActions();
    alignRows();
    return;
  }
  for (const line of group) await translateGroup([line], signal);
}

// Returns the candidates of each line, best first.
async function askForCandidates(group, search, signal) {
  const body = { q: group.map((line) => line.source), model: page.model.value, pieces: isExplained(), ...search };
  if (apiKey !== null) body.api_key = apiKey;
  const answer = await askServer("v1/translate", body, signal);
  const found = answer?.translations?.map((translation) => translation.candidates);
  if (found?.length !== group.length || !found.every((candidates) => candidates?.length > 0)) {
    throw new ServerProblem("The server's answer makes no sense.", 0);
  }
  return found;
}

function showCandidate(line, candidate, search = {}) {
  line.shown = candidate;
  line.search = search;
  line.isStale = false;
  line.refusal = null;
  line.map = null;
  drawLine(line);
  updateActions();
}

function announceLines(translated) {
  if (translated.length === 0) return;
  const text = translated.map((line) => line.shown?.text ?? line.refusal).join("\n");
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
  line.alternatives = null;
  line.row.replaceChildren(...drawCells(line));
  line.row.classList.toggle("stale", line.isStale);
  if (hadFocus) line.row.querySelector(".word")?.focus();
}

function drawCells(line) {
  if (isEmpty(line)) return [describeCell(makeCell("nothing"), "empty line")];
  if (line.refusal !== null) return [makeCell("refusal", `Not translated: ${line.refusal}`)];
  if (line.shown === null) return [describeCell(makeCell("nothing", "…"), "not translated yet")];
  const cells = [];
  for (const word of splitIntoWords(line.shown)) {
    if (word.isSpaced && cells.length > 0) cells.push(" ");
    cells.push(drawWord(word));
  }
  return cells;
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

function chooseLine(line) {
  current = line;
  for (const other of lines) {
    const isCurrent = other === current && lines.length > 1;
    other.row.classList.toggle("current", isCurrent);
    other.copy.classList.toggle("current", isCurrent);
  }
  updateActions();
}

function chooseLineAtCaret() {
  const before = page.source.value.slice(0, page.source.selectionStart);
  const line = lines[before.split("\n").length - 1];
  chooseLine(line && !isEmpty(line) ? line : lines.find((other) => !isEmpty(other)) ?? null);
}

function updateActions() {
  const isReady = current !== null && current.shown !== null && !current.isStale;
  page.alternatives.disabled = !isReady;
  page.look.disabled = !isReady;
  page.copy.disabled = !lines.some((line) => line.shown !== null);
  const first = page.result.querySelector(".word");
  if (first && !page.result.querySelector('.word[tabindex="0"]')) setTabStop(first);
}

function nameLine(line) {
  return lines.length > 1 ? `line ${lines.indexOf(line) + 1}` : "the line";
}

async function copyTranslation() {
  const text = lines.map((line) => (isEmpty(line) ? "" : line.shown?.text ?? "")).join("\n");
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
async function toggleAlternatives(line, takesFocus = true) {
  const wasOpen = line.alternatives !== null;
  closeAlternatives();
  if (wasOpen || line.shown === null || line.isStale || !isExplained()) return;
  chooseLine(line);
  const box = makeCell("alternatives", "Looking for alternatives …");
  line.alternatives = box;
  line.row.append(box);
  alignRows();
  try {
    const search = { n_best: N_ALTERNATIVES, beam: N_ALTERNATIVES };
    const [candidates] = await askForCandidates([line], search, null);
    if (line.alternatives === box) listAlternatives(line, candidates, search, takesFocus);
  } catch (error) {
    if (line.alternatives === box) box.textContent = `No alternatives: ${error.message}`;
    if (isAboutKey(error)) showProblem(error);
  }
}

function listAlternatives(line, candidates, search, takesFocus) {
  const list = makeElement("ul");
  list.setAttribute("role", "listbox");
  list.setAttribute("aria-label", `Alternatives of ${nameLine(line)}`);
  const choices = [{ candidate: line.shown, search: line.search }];
  for (const candidate of candidates) {
    const isNew = choices.every((choice) => choice.candidate.text !== candidate.text);
    if (isNew) choices.push({ candidate, search });
  }
  list.replaceChildren(...choices.map((choice) => drawChoice(line, choice)));
  line.alternatives.replaceChildren(list);
  alignRows();
  announce(`${choices.length - 1} alternatives`);
  const first = list.children[Math.min(1, choices.length - 1)];
  first.tabIndex = 0;
  if (takesFocus) first.focus();
}

function drawChoice(line, { candidate, search }) {
  const choice = makeElement("li");
  const isShown = candidate === line.shown;
  choice.setAttribute("role", "option");
  choice.setAttribute("aria-selected", String(isShown));
  choice.tabIndex = -1;
  compareWords(candidate.text, line.shown.text).forEach(({ text, isNew }, i) => {
    choice.append(i > 0 ? " " : "", isNew ? makeElement("b", "", text) : text);
  });
  choice.addEventListener("click", () => {
    if (!isShown) showCandidate(line, candidate, search);
    closeAlternatives(); // aligns the rows
    line.row.querySelector(".word")?.focus();
    if (!isShown) announce(`${nameLine(line)} is now: ${candidate.text}`);
  });
  return choice;
}

function focusChoice(choice) {
  for (const other of choice.parentElement.children) other.tabIndex = other === choice ? 0 : -1;
  choice.focus();
}

function closeAlternatives() {
  for (const line of lines) {
    line.alternatives?.remove();
    line.alternatives = null;
  }
  alignRows();
}

// --- attention ---

// The map of what the line shows, as the server's `attention` has it. A chosen alternative is found by its text in the
// search that found it.
function loadMap(line) {
  line.map ??= askForMap(line, line.shown);
  return line.map;
}

async function askForMap(line, shown) {
  try {
    const [candidates] = await askForCandidates([line], { ...line.search, attention: true }, null);
    const candidate = candidates.find((other) => other.text === shown.text);
    if (!candidate?.attention) throw new ServerProblem("the server did not send it", 0);
    return candidate.attention;
  } catch (error) {
    line.map = null; // the next time it is asked for again
    throw error;
  }
}

async function showFullAttention(line) {
  if (line === null || line.shown === null || line.isStale) return;
  page.attentionTitle.textContent = lines.length > 1 ? `Attention of ${nameLine(line)}` : "Attention";
  page.attentionView.textContent = "Asking the server …";
  page.attention.showModal();
  try {
    const map = await loadMap(line);
    page.attentionView.textContent = "";
    window.nmtAttention.show(page.attentionView, map);
  } catch (error) {
    page.attentionView.textContent = `No attention: ${error.message}`;
  }
}

// Shows for a word what it looks at: in the source, in the line of details, and to a screen reader if it has the focus.
async function lookAtWord(cell) {
  if (!cell.isConnected) return; // a new translation has come meanwhile
  const line = lineOfRow.get(cell.closest(".line"));
  const word = wordOfCell.get(cell);
  lookedAt = cell;
  page.detail.textContent = describeWord(word, []);
  const pieces = word.parts.flatMap((part) => part.pieces);
  if (line.isStale || pieces.length === 0) return;
  let map;
  try {
    map = await loadMap(line);
  } catch {
    return; // the details say nothing of attention then; the button tells why
  }
  if (lookedAt !== cell) return;
  const sources = weighSourceWords(line.source, map, pieces);
  showAttentionInSource(line, sources);
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

function showAttentionInSource(line, words = []) {
  for (const element of page.backdrop.querySelectorAll(".looked-at")) {
    element.classList.remove("looked-at");
    element.replaceChildren(element.textContent); // without marks
  }
  if (line === null) return;
  const children = [];
  let at = 0;
  for (const { start, end, text, weight } of chooseLookedAt(words)) {
    children.push(line.source.slice(at, start), makeElement("mark", nameWeight(weight), text));
    at = end;
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
  const line = lineOfRow.get(cell.closest(".line"));
  if (/^(Arrow.*|Home|End)$/.test(event.key)) moveFocus(cell, event.key);
  else if (event.key === "Enter" || event.key === " ") toggleAlternatives(line);
  else if (event.key === "a" || event.key === "A") showFullAttention(line);
  else if (event.key === "c" || event.key === "C") copyTranslation();
  else if (event.key === "Escape") leaveWords();
  else return;
  event.preventDefault();
}

function leaveWords() {
  const isOpen = lines.some((line) => line.alternatives !== null);
  if (isOpen) closeAlternatives();
  else page.source.focus();
}

function handleKeyOnChoice(event, choice) {
  const choices = [...choice.parentElement.children];
  const place = choices.indexOf(choice);
  const next = { ArrowDown: place + 1, ArrowUp: place - 1, Home: 0, End: choices.length - 1 }[event.key];
  if (next !== undefined) focusChoice(choices[Math.max(0, Math.min(next, choices.length - 1))]);
  else if (event.key === "Enter" || event.key === " ") choice.click();
  else if (event.key === "Escape") closeChoices(choice);
  else return;
  event.preventDefault();
}

function closeChoices(choice) {
  const row = choice.closest(".line");
  closeAlternatives();
  row.querySelector(".word")?.focus();
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
  chooseLine(lineOfRow.get(row));
  const isSelecting = !getSelection().isCollapsed; // the user marks text
  if (cell && !isSelecting) toggleAlternatives(lineOfRow.get(row), false);
}

function handlePointerOver(event) {
  const cell = event.target.closest(".word");
  if (cell === lookedAt) return;
  clearTimeout(hoverTimer);
  if (cell) hoverTimer = setTimeout(() => lookAtWord(cell), HOVER_PAUSE);
}

function handleFocusIn(event) {
  const cell = event.target;
  chooseLine(lineOfRow.get(cell.closest(".line")));
  if (!cell.matches(".word")) return;
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
  page.alternatives.addEventListener("click", () => toggleAlternatives(current));
  page.look.addEventListener("click", () => showFullAttention(current));
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
