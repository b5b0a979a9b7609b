// The server's page: text in, text out, while typing.
//
// The text is a list of lines. A line keeps its translation until it is changed, so only changed lines are asked for. A
// newer question aborts the older one: an older answer never replaces a newer one. All text is shown through
// textContent; nothing writes HTML or a style attribute, as the server's Content-Security-Policy demands.

const TYPING_PAUSE = 250; // milliseconds without a key before the text is translated
const LINES_PER_QUESTION = 8; // long texts appear part by part
const MOST_ALTERNATIVES = 4;
const SECONDS_UNTIL_RETRY = 3; // where the server does not say when
const LONGEST_RETRY = 60;
const LONGEST_ANNOUNCEMENT = 400; // characters that a screen reader is given at once

const page = Object.fromEntries([...document.querySelectorAll("[id]")].map((element) => [element.id, element]));

let directions = []; // {source, target}, each a language of the server: {code, name}
let lines = []; // {source, row, translation, refusal}
let apiKey = null; // in memory only
let question = new AbortController(); // of the newest translation
let typingTimer = 0;
let retryTimer = 0;

class ServerProblem extends Error {
  constructor(message, status, retryAfter = null) {
    super(message);
    this.status = status; // 0 if there was no answer
    this.retryAfter = retryAfter; // seconds, if it makes sense to ask again
  }
}

// --- asking the server ---

async function askServer(path, body = null, signal = null) {
  const request = { signal };
  if (body !== null) {
    request.method = "POST";
    request.headers = { "Content-Type": "application/json" };
    request.body = JSON.stringify(apiKey === null ? body : { ...body, api_key: apiKey });
  }
  let response;
  let answer;
  try {
    response = await fetch(path, request);
    answer = await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerProblem("The server does not answer.", response?.status ?? 0, SECONDS_UNTIL_RETRY);
  }
  if (response.ok) return answer;
  const reason = typeof answer?.error === "string" ? answer.error : `status ${response.status}`;
  if (response.status === 503) {
    const seconds = Number(response.headers.get("Retry-After")) || SECONDS_UNTIL_RETRY;
    throw new ServerProblem("The server is busy.", 503, Math.min(seconds, LONGEST_RETRY));
  }
  throw new ServerProblem(response.status < 500 ? reason : `The server failed: ${reason}`, response.status);
}

function readDirection() {
  return directions[page.direction.selectedIndex];
}

async function askForTranslations(texts, alternatives, signal) {
  const { source, target } = readDirection();
  const question = { q: texts, source: source.code, target: target.code, alternatives };
  const answer = await askServer("translate", question, signal);
  if (answer?.translatedText?.length !== texts.length) throw new ServerProblem("The server's answer makes no sense.", 0);
  return answer;
}

// --- the text and its lines ---

function isWaiting(line) {
  return line.source.trim() !== "" && line.translation === null && line.refusal === null;
}

function makeLine(source, before) {
  const row = makeElement("div", "line stale");
  if (before?.translation) row.append(...before.row.childNodes); // faded, until the new one is there
  return { source, row, translation: null, refusal: null };
}

// Lines at the start and the end that are what they were keep their translations.
function readText() {
  const sources = page.source.value.split("\n");
  const shorter = Math.min(sources.length, lines.length);
  let nFirst = 0;
  while (nFirst < shorter && sources[nFirst] === lines[nFirst].source) nFirst += 1;
  let nLast = 0;
  while (nLast < shorter - nFirst && sources.at(-1 - nLast) === lines.at(-1 - nLast).source) nLast += 1;
  const last = lines.slice(lines.length - nLast);
  const changed = sources.slice(nFirst, sources.length - nLast).map((source, i) => makeLine(source, lines[nFirst + i]));
  lines = [...lines.slice(0, nFirst), ...changed, ...last];
  page.result.replaceChildren(...lines.map((line) => line.row));
  updateCopy();
}

function readTextAndWait() {
  readText();
  question.abort(); // it asked about a text that is no longer there
  clearTimeout(typingTimer);
  typingTimer = setTimeout(translateWaiting, TYPING_PAUSE);
}

function startAnew() {
  lines = [];
  readText();
  translateWaiting();
}

async function translateWaiting() {
  if (directions.length === 0) return; // as soon as they are known, it is called again
  clearTimeout(typingTimer);
  clearTimeout(retryTimer);
  question.abort();
  question = new AbortController();
  const { signal } = question;
  const waiting = lines.filter(isWaiting);
  try {
    for (let i = 0; i < waiting.length; i += LINES_PER_QUESTION) {
      await translateGroup(waiting.slice(i, i + LINES_PER_QUESTION), signal);
    }
    showProblem(null);
    announce(waiting);
  } catch (error) {
    if (!signal.aborted) showProblem(error);
  }
}

async function translateGroup(group, signal) {
  let answer;
  try {
    answer = await askForTranslations(group.map((line) => line.source), 0, signal);
  } catch (error) {
    const isRefused = error.status >= 400 && error.status < 500 && error.status !== 403;
    if (signal.aborted || !isRefused) throw error;
    // One line that the server refuses must not cost its neighbours their translation.
    if (group.length === 1) group[0].refusal = error.message;
    else for (const line of group) await translateGroup([line], signal);
  }
  if (signal.aborted) return;
  if (answer) group.forEach((line, i) => (line.translation = answer.translatedText[i]));
  group.forEach(drawLine);
  updateCopy();
}

// --- drawing ---

function makeElement(name, className = "", text = "") {
  const element = document.createElement(name);
  if (className) element.className = className;
  element.textContent = text;
  return element;
}

function drawLine(line) {
  line.row.className = "line";
  if (line.refusal !== null) {
    line.row.replaceChildren(makeElement("span", "refusal", line.refusal));
    return;
  }
  if (line.translation === null) return; // its group was refused, and it was asked for by itself
  const element = makeElement("span", "translation", line.translation);
  line.row.replaceChildren(element);
  if (line.translation === "") return;
  element.tabIndex = 0;
  element.setAttribute("role", "button");
  element.setAttribute("aria-expanded", "false");
  element.addEventListener("click", () => showAlternatives(line, element));
  element.addEventListener("keydown", (event) => {
    if (event.key === "Enter") showAlternatives(line, element);
  });
}

async function showAlternatives(line, element) {
  const wasOpen = element.getAttribute("aria-expanded") === "true";
  lines.filter((other) => other.translation !== null || other.refusal !== null).forEach(drawLine); // closes what is open
  if (wasOpen || line.translation === null) return;
  let answer;
  try {
    answer = await askForTranslations([line.source], MOST_ALTERNATIVES, null);
  } catch (error) {
    showProblem(error);
    return;
  }
  const opened = line.row.querySelector(".translation");
  if (!opened || !lines.includes(line)) return; // the text has changed meanwhile
  opened.setAttribute("aria-expanded", "true");
  const box = makeElement("span", "alternatives");
  for (const text of [...answer.translatedText, ...answer.alternatives[0]]) {
    const choice = makeElement("button", "", text);
    choice.type = "button";
    choice.addEventListener("click", () => takeAlternative(line, text));
    box.append(choice);
  }
  opened.after(box);
  box.firstChild.focus();
}

function takeAlternative(line, text) {
  line.translation = text;
  drawLine(line);
}

function updateCopy() {
  page.copy.disabled = !lines.some((line) => line.translation !== null) || lines.some(isWaiting);
}

function writeResult() {
  return lines.map((line) => line.translation ?? "").join("\n");
}

function announce(translated) {
  if (translated.length === 0) return;
  const text = translated.map((line) => line.refusal ?? line.translation ?? "").join("\n");
  page.status.textContent = text.length <= LONGEST_ANNOUNCEMENT ? text : `${translated.length} lines translated`;
}

function showProblem(error) {
  page.keyForm.hidden = error?.status !== 403;
  page.problem.hidden = error === null;
  page.problemText.textContent = error?.message ?? "";
  if (error?.status === 403) page.key.focus();
  clearTimeout(retryTimer);
  if (error?.retryAfter) retryTimer = setTimeout(start, 1000 * error.retryAfter);
}

// --- the beginning ---

async function start() {
  try {
    if (directions.length === 0) {
      const languages = await askServer("languages");
      directions = listDirections(languages);
      const names = directions.map(({ source, target }) => `${source.name} to ${target.name}`);
      page.direction.replaceChildren(...names.map((name) => new Option(name)));
      page.directionChoice.hidden = directions.length < 2;
      nameLanguages();
    }
  } catch (error) {
    showProblem(error);
    return;
  }
  translateWaiting();
}

function listDirections(languages) {
  const byCode = new Map(languages.map((language) => [language.code, language]));
  return languages.flatMap((source) => source.targets.map((code) => ({ source, target: byCode.get(code) })));
}

function nameLanguages() {
  const { source, target } = readDirection();
  page.source.lang = source.code;
  page.result.lang = target.code;
  page.sourceLanguage.textContent = source.name;
  page.targetLanguage.textContent = target.name;
}

page.source.addEventListener("input", readTextAndWait);
page.source.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && event.ctrlKey) translateWaiting();
});
page.direction.addEventListener("change", () => {
  nameLanguages();
  startAnew();
});
page.tryAgain.addEventListener("click", start);
page.copy.addEventListener("click", () => navigator.clipboard.writeText(writeResult()));
page.keyForm.addEventListener("submit", (event) => {
  event.preventDefault();
  apiKey = page.key.value;
  page.key.value = "";
  start();
});
readText();
start();
