// Requests to the server, with the API key of this tab.

import { askForKey } from "./key_dialog.js";
import { events } from "./event_stream.js";
import { remember, remembered } from "./tab_storage.js";

const KEY = "hetero-kv.api-key";

/** A request that was not answered; `status` is HTTP's, 0 where the server could not be reached. */
export class RequestError extends Error {
  constructor(message, status, details = {}) {
    super(message);
    this.status = status;
    this.details = details;
  }
}

function headers() {
  const key = remembered(KEY);
  return key ? { authorization: `Bearer ${key}` } : {};
}

/** The error in the body of a response, in OpenAI's form. */
function errorOf(status, text) {
  try {
    const { error } = JSON.parse(text);
    if (error?.message) return new RequestError(error.message, status, error);
  } catch {
    // A proxy's page.
  }
  return new RequestError(`The server answered with status ${status}.`, status);
}

let asking = null;

/** Asks for the API key, once for all requests that need it; false where none is given. */
function newKey() {
  asking ??= askForKey(remembered(KEY) !== null)
    .then((key) => {
      if (key) remember(KEY, key);
      return Boolean(key);
    })
    .finally(() => {
      asking = null;
    });
  return asking;
}

/** The response to a request. Throws RequestError where it is none of success, and AbortError. */
async function send(path, options = {}) {
  for (;;) {
    let response;
    try {
      response = await fetch(path, { ...options, headers: { ...options.headers, ...headers() } });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new RequestError("The server cannot be reached. Is it running?", 0);
    }
    if (response.ok) return response;
    if (response.status !== 401 || !(await newKey())) throw errorOf(response.status, await response.text());
  }
}

const posted = (body, signal) => ({
  method: "POST",
  headers: { "content-type": "application/json" },
  body: JSON.stringify(body),
  signal,
});

/** The JSON at a path. */
export const get = async (path) => (await send(path)).json();

/** The text at a path. */
export const getText = async (path) => (await send(path)).text();

/** The JSON that answers to a body. */
export const post = async (path, body, signal) => (await send(path, posted(body, signal))).json();

/** Removes what is at a path. */
export const remove = (path) => send(path, { method: "DELETE" });

/** The events that answer to a body, as they come. Throws RequestError also for an error in the stream. */
export async function* stream(path, body, signal) {
  const response = await send(path, posted(body, signal));
  try {
    for await (const event of events(response.body)) {
      if (event.error) throw new RequestError(event.error.message, response.status, event.error);
      yield event;
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof RequestError) throw error;
    throw new RequestError("The connection to the server broke in the middle of the answer.", 0);
  }
}

/** Uploads a file; `onProgress` gets the share that was sent. `fetch` does not tell it. */
export async function upload(file, onProgress, signal) {
  for (;;) {
    const { status, text } = await sendFile(file, onProgress, signal);
    if (status >= 200 && status < 300) return JSON.parse(text);
    if (status !== 401 || !(await newKey())) throw errorOf(status, text);
  }
}

function sendFile(file, onProgress, signal) {
  const form = new FormData();
  form.append("purpose", "user_data");
  form.append("file", file, file.name);
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", "v1/files");
    for (const [name, value] of Object.entries(headers())) request.setRequestHeader(name, value);
    request.upload.addEventListener("progress", ({ loaded, total }) => onProgress(total ? loaded / total : 0));
    request.addEventListener("load", () => resolve({ status: request.status, text: request.responseText }));
    request.addEventListener("error", () =>
      reject(new RequestError("The upload broke. Is the server running, and the file still there?", 0)),
    );
    request.addEventListener("abort", () => reject(new DOMException("The upload was stopped.", "AbortError")));
    signal.addEventListener("abort", () => request.abort());
    request.send(form);
  });
}
