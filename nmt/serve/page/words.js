// Pieces and words: what a translation is made of, what its words look at, where two translations differ.
//
// Nothing here touches the page. Pieces are what the model reads and writes; "▁" begins a word. Where pieces do not spell
// the text, because the vocabulary normalised it or wrote it in bytes, words are shown without what is not known.

const SPACE = "▁";
const END = "</s>";
const NOT_SPACED = /[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Thai}\p{Script=Lao}\p{Script=Khmer}]/u;
const PUNCTUATION = /^[\p{P}\p{S}]+$/u;
const SOURCE_WORD = /[\p{L}\p{M}\p{N}]+(?:[-'’.][\p{L}\p{M}\p{N}]+)*|\S/gu;
const FARTHEST = 20; // characters that the next piece may be away; one farther away is another of its spelling

// --- the translation ---

// A candidate as words: {text, isSpaced, probability, parts: [{text, probability, pieces}]}, where `pieces` are places of
// pieces in the candidate. Punctuation is a word by itself. If pieces and text have different numbers of words, which
// pieces belong to a word is not known, and neither is its probability.
export function splitIntoWords(candidate) {
  const written = candidate.text.split(/[ \t\n]+/).filter((word) => word !== ""); // no-break spaces are inside words
  const groups = groupPieces(candidate.pieces ?? []);
  if (groups.length !== written.length) {
    return written.map((text) => makeWord([{ text, probability: null, pieces: [] }], true));
  }
  return written.flatMap((text, i) => splitParts(text, spellWord(text, groups[i])));
}

function groupPieces(pieces) {
  const groups = [];
  pieces.forEach(({ piece, log_prob: logProb }, place) => {
    if (piece === END) return;
    const part = { text: piece.replace(SPACE, ""), probability: Math.exp(logProb), pieces: [place] };
    if (piece.startsWith(SPACE) || groups.length === 0) groups.push([part]);
    else groups.at(-1).push(part);
  });
  return groups;
}

// What the pieces do not spell, such as a word written in bytes, is one part.
function spellWord(text, parts) {
  const spelled = parts.map((part) => part.text).join("");
  if (spelled === text) return parts.filter((part) => part.text !== "");
  return [{ text, probability: multiply(parts), pieces: parts.flatMap((part) => part.pieces) }];
}

function splitParts(text, parts) {
  const words = [];
  for (const part of parts) {
    const isAlone = NOT_SPACED.test(text) || PUNCTUATION.test(part.text);
    const isAfterAlone = words.length > 0 && PUNCTUATION.test(words.at(-1).at(-1).text);
    if (words.length === 0 || isAlone || isAfterAlone) words.push([part]);
    else words.at(-1).push(part);
  }
  return words.map((ofWord, i) => makeWord(ofWord, i === 0));
}

function makeWord(parts, isSpaced) {
  const isKnown = parts.every((part) => part.probability !== null);
  const text = parts.map((part) => part.text).join("");
  return { text, isSpaced, parts, probability: isKnown ? multiply(parts) : null };
}

function multiply(parts) {
  return parts.reduce((product, part) => product * part.probability, 1);
}

// --- attention ---

// The words of the source with their share of the attention of some pieces of the translation: {start, end, text, weight}.
export function weighSourceWords(source, map, pieces) {
  const weights = averageAttention(map, pieces);
  const places = placePieces(source, map.source);
  return splitSource(source).map(({ start, text }) => {
    const end = start + text.length;
    const inside = weights.filter((_, s) => places[s] >= start && places[s] < end);
    return { start, end, text, weight: inside.reduce((sum, weight) => sum + weight, 0) };
  });
}

// The share of each source piece: the mean over the pieces of the translation and over the heads of the last layer but
// one, as for alignments, because that layer follows the source best.
function averageAttention(map, pieces) {
  const layers = map.attention.memory;
  const heads = layers[Math.max(0, layers.length - 2)].map(decodeBytes);
  return map.source.map((_, s) => {
    let sum = 0;
    for (const head of heads) {
      for (const t of pieces) sum += head[t * map.source.length + s];
    }
    return sum / (255 * heads.length * pieces.length);
  });
}

function decodeBytes(base64) {
  return Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
}

// Where each piece begins in the text; -1 for the end mark. A piece that the text does not have, because it was
// normalised, is where the one before it ended.
function placePieces(text, pieces) {
  let at = 0;
  return pieces.map((piece) => {
    if (piece === END) return -1;
    if (piece.startsWith(SPACE)) at = skipSpace(text, at);
    const spelled = piece.replaceAll(SPACE, "");
    const found = text.indexOf(spelled, at);
    if (found < 0 || found > at + FARTHEST) return at;
    at = found + spelled.length;
    return found;
  });
}

function skipSpace(text, at) {
  const rest = text.slice(at);
  return at + rest.length - rest.trimStart().length;
}

function splitSource(source) {
  return [...source.matchAll(SOURCE_WORD)].flatMap(({ index, 0: text }) => {
    if (!NOT_SPACED.test(text)) return [{ start: index, text }];
    return [...text.matchAll(/./gsu)].map((character) => ({ start: index + character.index, text: character[0] }));
  });
}

// --- two translations ---

// The words of a text, and whether each is one that another text lacks: {text, isNew}.
export function compareWords(text, other) {
  const words = text.split(" ");
  const others = other.split(" ");
  const common = countCommonWords(words, others);
  const compared = [];
  let j = 0;
  words.forEach((word, i) => {
    while (j < others.length && words[i] !== others[j] && common[i][j + 1] > common[i + 1][j]) j += 1;
    const isNew = words[i] !== others[j];
    compared.push({ text: word, isNew });
    if (!isNew) j += 1;
  });
  return compared;
}

// The length of the longest common subsequence from word i of one text and word j of the other to their ends.
function countCommonWords(words, others) {
  const common = Array.from({ length: words.length + 1 }, () => new Array(others.length + 1).fill(0));
  for (let i = words.length - 1; i >= 0; i -= 1) {
    for (let j = others.length - 1; j >= 0; j -= 1) {
      const isSame = words[i] === others[j];
      common[i][j] = isSame ? common[i + 1][j + 1] + 1 : Math.max(common[i + 1][j], common[i][j + 1]);
    }
  }
  return common;
}
