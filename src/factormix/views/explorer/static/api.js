// Questions to the server that this page came from. Answers hold facts and arrays in one message.

const ARRAYS = {
  float32: Float32Array, float64: Float64Array, int32: Int32Array, uint8: Uint8Array,
};

export class Refusal extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }

  // What is not there yet may be asked for again.
  get later() {
    return this.status === 202;
  }
}

async function answered(path, options) {
  let response;
  try {
    response = await fetch(`api/${path}`, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal("The explorer does not answer: has its command ended? Start it again.", 0);
  }
  if (response.status === 202) throw new Refusal((await response.json()).later, 202);
  if (response.ok) return response;
  const text = await response.text();
  let said = text;
  try {
    said = JSON.parse(text).error;
  } catch { /* A plain sentence. */ }
  throw new Refusal(said, response.status);
}

export async function ask(path, signal) {
  return unpacked(await (await answered(path, { signal })).arrayBuffer());
}

export async function send(path, values, signal) {
  const response = await answered(path, { method: "POST", body: values, signal });
  return unpacked(await response.arrayBuffer());
}

export async function state() {
  return (await answered("state", {})).json();
}

function unpacked(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const first = 4 + length;
  const arrays = {};
  for (const { name, dtype, shape, at } of header.arrays) {
    const size = shape.reduce((product, n) => product * n, 1);
    arrays[name] = Object.assign(new ARRAYS[dtype](buffer, first + at, size), { shape });
  }
  return { facts: header.facts, ...arrays };
}

// Ask again and again while the answer is "not yet", and tell how far it is in between.
export async function patiently(path, signal, waiting) {
  for (;;) {
    try {
      return await ask(path, signal);
    } catch (error) {
      if (!error.later || signal.aborted) throw error;
      waiting(error.message);
      await new Promise((done) => setTimeout(done, 400));
      if (signal.aborted) throw error;
    }
  }
}
