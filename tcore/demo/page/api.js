// Requests to the program, and messages about them. Every failure is an Error whose message is a sentence.

const byId = (id) => document.getElementById(id);

export { byId };

export function complain(message) {
  const box = byId("alert");
  box.querySelector("span").textContent = message;
  box.hidden = !message;
}

byId("alert").querySelector("button").addEventListener("click", () => complain(""));

async function ask(path, options = {}) {
  let answer;
  try {
    answer = await fetch(path, options);
  } catch {
    throw new Error("The program does not answer. Is tcore demo still running?");
  }
  if (answer.ok) return answer;
  const text = await answer.text();
  let message = `The program answered with status ${answer.status}.`;
  try { message = JSON.parse(text).error; } catch { /* not one of our messages */ }
  const error = new Error(message);
  error.status = answer.status;
  throw error;
}

const post = (path, body, kind = "application/json") =>
  ask(path, { method: "POST", body, headers: { "X-Tcore-Demo": "1", "Content-Type": kind } });

const json = async (answer) => (await answer).json();

export const info = () => json(ask("/api/info"));

export class Visit {
  // One visitor; the id is kept until the tab is closed, so that a reload finds the clip again.
  async open() {
    this.id = sessionStorage.getItem("visit");
    if (this.id) {
      try {
        return await this.state();
      } catch (error) {
        if (error.status === 400) return null; // known, but without a clip
      }
    }
    await this.renew();
    return null;
  }

  async renew() {
    this.id = (await json(post("/api/visit", "{}"))).id;
    sessionStorage.setItem("visit", this.id);
  }

  path(rest) { return `/api/visit/${this.id}/${rest}`; }
  state() { return json(ask(this.path("state"))); }
  sample(key) { return this.retried(() => json(post(this.path("sample"), JSON.stringify({ sample: key })))); }
  upload(file) { return this.retried(() => json(post(this.path("upload"), file, "application/octet-stream"))); }
  estimate() { return json(ask(this.path("estimate"))); }
  truth() { return json(ask(this.path("truth"))); }
  mark(said) { return json(post(this.path("mark"), JSON.stringify(said))); }
  detail(detail) { return json(post(this.path("detail"), JSON.stringify({ detail }))); }
  run(labels) { return json(post(this.path("run"), JSON.stringify(labels))); }
  cancel() { return json(post(this.path("cancel"), "{}")); }
  inspect(query) { return json(ask(this.path(`inspect?${new URLSearchParams(query)}`))); }
  async mask(frame) { return new Uint8Array(await (await ask(this.path(`mask/${frame}`))).arrayBuffer()); }
  async download(name) { return (await ask(this.path(`download/${name}`))).blob(); }
  frame(key, number) { return this.path(`frame/${key}/${number}`); }

  // A visitor whose visit has ended comes back as a new one.
  async retried(work) {
    try {
      return await work();
    } catch (error) {
      if (error.status !== 410) throw error;
      await this.renew();
      return work();
    }
  }
}

export function seconds(value) {
  if (value < 90) return `${Math.max(1, Math.round(value))} s`;
  return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}
