// Questions to the server, and what can go wrong with them in words for people.
//
// Addresses are relative, so that the page also works behind a proxy that puts it into a folder.

const SECONDS_UNTIL_RETRY = 3; // where the server does not say when
const LONGEST_RETRY = 60;

export class ServerProblem extends Error {
  constructor(message, status, retryAfter = null) {
    super(message);
    this.status = status; // 0 if there was no answer
    this.retryAfter = retryAfter; // seconds, if it makes sense to ask again
  }
}

export async function askServer(path, body = null, signal = null) {
  const request = { signal };
  if (body !== null) {
    request.method = "POST";
    request.headers = { "Content-Type": "application/json" };
    request.body = JSON.stringify(body);
  }
  let response;
  try {
    response = await fetch(path, request);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerProblem("The server does not answer.", 0, SECONDS_UNTIL_RETRY);
  }
  const answer = await readJson(response, signal);
  if (!response.ok) throw describeRefusal(response, answer);
  return answer;
}

async function readJson(response, signal) {
  try {
    return await response.json();
  } catch (error) {
    if (signal?.aborted) throw error;
    if (!response.ok) return {};
    throw new ServerProblem("The server's answer was cut off.", 0, SECONDS_UNTIL_RETRY);
  }
}

function describeRefusal(response, answer) {
  const reason = typeof answer?.error === "string" ? answer.error : `status ${response.status}`;
  if (response.status === 503 || response.status === 429) {
    const seconds = Number(response.headers.get("Retry-After")) || SECONDS_UNTIL_RETRY;
    return new ServerProblem("The server is busy.", response.status, Math.min(seconds, LONGEST_RETRY));
  }
  if (response.status === 504) return new ServerProblem("The server took too long.", 504);
  if (response.status >= 500) return new ServerProblem(`The server failed: ${reason}`, response.status);
  return new ServerProblem(reason, response.status);
}

export function isAboutKey(error) {
  return error.status === 401 || error.status === 403;
}

// The server refused what it was asked, and would again.
export function isRefused(error) {
  return error.status >= 400 && error.status < 500 && error.status !== 429 && !isAboutKey(error);
}
