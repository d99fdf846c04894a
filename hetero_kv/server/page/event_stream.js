// Reads server-sent events.

/** The JSON values of the events in a stream of bytes, up to `[DONE]`. Comments are left out. */
export async function* events(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  } finally {
    // Nobody reads on: the server learns it, and stops.
    reader.cancel().catch(() => {});
  }
}
