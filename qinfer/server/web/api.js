// Talking to the server this page came from; to nobody else.

const KEY = "qinfer.key";
let key = read(sessionStorage) ?? read(localStorage);
let askForKey = null; // set by keys.js: shows the dialog, resolves to whether there is a key now

function read(storage) {
  try {
    return storage.getItem(KEY);
  } catch {
    return null; // storage is switched off
  }
}

/** What the server said went wrong, or that it said nothing (status 0). */
export class ApiError extends Error {
  constructor(message, { status = 0, code = null, param = null, retryAfter = null } = {}) {
    super(message);
    this.name = "ApiError";
    Object.assign(this, { status, code, param, retryAfter });
  }
}

/** Set what is called when the server wants a key. */
export function onKeyWanted(ask) {
  askForKey = ask;
}

/** Use a key from now on; remembered beyond this tab only if asked to. */
export function setKey(value, remember) {
  key = value;
  try {
    sessionStorage.setItem(KEY, value);
    if (remember) localStorage.setItem(KEY, value);
    else localStorage.removeItem(KEY);
  } catch {
    // kept in memory
  }
}

export const hasKey = () => Boolean(key);

/**
 * Send a request and return the response if it is good. Asks for a key when the server answers 401.
 * Throws ApiError, or AbortError when `signal` fires.
 */
export async function send(path, { method = "GET", body, signal, quiet = false, onSend } = {}) {
  for (;;) {
    const used = key;
    onSend?.(); // again after a key was typed in, so that nobody's typing is timed
    const response = await attempt(path, method, body, signal);
    if (response.ok) return response;
    const error = await errorOf(response);
    if (response.status !== 401 || quiet || !askForKey) throw error;
    // Another request may have got a key meanwhile.
    if (key === used && !(await askForKey(used ? error.message : null))) throw error;
  }
}

async function attempt(path, method, body, signal) {
  const headers = {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  if (key) headers.Authorization = `Bearer ${key}`;
  try {
    return await fetch(path, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body), cache: "no-store", credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. Is it still running?");
  }
}

/** Return the error in an OpenAI-shaped answer, or one made of the status. */
async function errorOf(response) {
  const facts = { status: response.status, retryAfter: Number(response.headers.get("Retry-After")) || null };
  try {
    const { error } = await response.json();
    return new ApiError(error.message, { ...facts, code: error.code, param: error.param });
  } catch {
    return new ApiError(`The server answered ${response.status} ${response.statusText}`.trim() + ".", facts);
  }
}

/** GET a JSON document. */
export async function getJson(path, options) {
  return (await send(path, options)).json();
}
