// Python, beside the page: nothing freezes while it starts or searches.

const python = load();
python.catch(() => {}); // told by whoever waits for it

async function load() {
  const { loadPyodide } = await import("./pyodide/pyodide.mjs").catch(missing);
  const [pyodide, zip] = await Promise.all([
    loadPyodide({ indexURL: new URL("./pyodide/", import.meta.url).href }).catch(missing),
    fetchZip(),
  ]);
  pyodide.unpackArchive(zip, "zip", { extractDir: "/lab" });
  pyodide.runPython("import sys; sys.path.insert(0, '/lab')");
  return pyodide.pyimport("answers");
}

function missing(error) {
  console.error(error);
  throw new Error("Pyodide is not whole beside this page: make site puts it into lab/pyodide.");
}

async function fetchZip() {
  const response = await fetch(new URL("./lab.zip", import.meta.url));
  if (!response.ok) throw new Error("lab.zip is missing beside this page: make site builds it.");
  return response.arrayBuffer();
}

// {id, room}: what its controls offer. {id, room, asked}: an answer.
onmessage = async ({ data: { id, room, asked } }) => {
  try {
    const answers = await python;
    const text = asked ? answers.answer(room, JSON.stringify(asked)) : answers.choices(room);
    postMessage({ id, answer: JSON.parse(text) });
  } catch (error) {
    console.error(error);
    postMessage({ id, failed: String(error.message ?? error).trim().split("\n").at(-1) });
  }
};
