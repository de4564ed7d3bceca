// Asks Python, which runs in a worker.

const waiting = new Map();
let worker;
let broken; // why the worker cannot run at all
let last = 0;

/** What the controls of a room offer. */
export const choices = (room) => send({ room });

/** The answer of a room to the values of its controls. A refusal is {error: sentence}. */
export const answer = (room, asked) => send({ room, asked });

function send(message) {
  worker ??= start();
  return new Promise((resolve, reject) => {
    if (broken) {
      reject(broken);
      return;
    }
    waiting.set(++last, { resolve, reject });
    worker.postMessage({ id: last, ...message });
  });
}

function start() {
  const started = new Worker(new URL("./worker.mjs", import.meta.url), { type: "module" });
  started.onmessage = ({ data }) => {
    const { resolve, reject } = waiting.get(data.id);
    waiting.delete(data.id);
    if (data.failed) reject(new Error(data.failed));
    else resolve(data.answer);
  };
  started.onerror = (event) => {
    broken = new Error(`Python cannot start here: ${event.message ?? "the worker failed"}`);
    for (const { reject } of waiting.values()) reject(broken);
    waiting.clear();
  };
  return started;
}
