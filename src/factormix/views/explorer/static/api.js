// Requests to the server of this page. An answer holds facts and arrays in one message.

const ARRAYS = {
  float32: Float32Array, float64: Float64Array, int32: Int32Array, uint8: Uint8Array,
};

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }

  // Whether the answer is not ready yet and may be asked for again.
  get later() {
    return this.status === 202;
  }
}

async function request(path, options) {
  let response;
  try {
    response = await fetch(`api/${path}`, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The explorer does not answer: has its command ended? Start it again.", 0);
  }
  if (response.status === 202) throw new ApiError((await response.json()).later, 202);
  if (response.ok) return response;
  const text = await response.text();
  let message = text;
  try {
    message = JSON.parse(text).error;
  } catch { /* A plain sentence. */ }
  throw new ApiError(message, response.status);
}

export async function ask(path, signal) {
  return unpack(await (await request(path, { signal })).arrayBuffer());
}

export async function send(path, values, signal) {
  const response = await request(path, { method: "POST", body: values, signal });
  return unpack(await response.arrayBuffer());
}

export async function fetchState() {
  return (await request("state", {})).json();
}

function unpack(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const first = 4 + length;
  const arrays = {};
  for (const { name, dtype, shape, offset } of header.arrays) {
    const size = shape.reduce((product, n) => product * n, 1);
    arrays[name] = Object.assign(new ARRAYS[dtype](buffer, first + offset, size), { shape });
  }
  return { facts: header.facts, ...arrays };
}

// Ask until the answer is ready; `waiting` is called with each message of progress.
export async function askUntilReady(path, signal, waiting, body) {
  for (;;) {
    try {
      return await (body ? send(path, body, signal) : ask(path, signal));
    } catch (error) {
      if (!error.later || signal.aborted) throw error;
      waiting(error.message);
      await new Promise((done) => setTimeout(done, 400));
      if (signal.aborted) throw error;
    }
  }
}
