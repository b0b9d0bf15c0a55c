/* Rollwire: feedback from a page. What it offers is in feedback.d.ts.

   <script async src="https://GATEWAY/v1/feedback.js" data-key="PUBLISHABLE KEY"></script>
   (window.rollwire ||= []).push({ rollout_id: "...", signal: "thumb", value: 1 })

   An event waits in localStorage until the gateway has said that the log has it, over page loads too, and is sent again under
   its id: nothing is lost, nothing counts twice. text/plain with the key in the address needs no preflight, and is what
   sendBeacon can say. */
(() => {
  "use strict";
  const EVENTS = 500, BATCH = 50, BYTES = 48e3, CAP_MS = 30e3, ANSWER_MS = 15e3;

  const uuid7 = () => {
    const bytes = crypto.getRandomValues(new Uint8Array(16));
    const hex = (n, width) => n.toString(16).padStart(width, "0");
    bytes[6] = 0x70 | (bytes[6] & 15);
    bytes[8] = 0x80 | (bytes[8] & 63);
    const tail = [...bytes.slice(6)].map((byte) => hex(byte, 2)).join("");
    return (hex(Date.now(), 12) + tail).replace(/(.{8})(.{4})(.{4})(.{4})/, "$1-$2-$3-$4-");
  };

  const create = ({ url, key, onRefused, lingerMs = 200 }) => {
    const address = url.replace(/\/+$/, "").replace(/(\/v1\/feedback)?$/, "/v1/feedback");
    const target = address + "?key=" + encodeURIComponent(key);
    const prefix = "rollwire " + address + " ";
    const held = new Map(); // feedback id -> JSON: what waits
    let beaconed = new Set(); // ids that a beacon took: its answer is not known
    let size = BATCH, failures = 0, timer, busy;

    // Without storage (switched off, or full) events live as long as the page.
    const stored = (use) => { try { return use(localStorage); } catch { return undefined; } };
    const keep = (id, text) => { held.set(id, text); stored((s) => s.setItem(prefix + id, text)); };
    const drop = (id) => { held.delete(id); stored((s) => s.removeItem(prefix + id)); };
    stored((s) => Object.keys(s).forEach((k) => k.startsWith(prefix) && held.set(k.slice(prefix.length), s[k])));

    const refuse = (id, said) => {
      const event = JSON.parse(held.get(id));
      // A clock that is wrong is no reason to lose a click: the gateway's own time stands in.
      if (said.code === "time_invalid" && /happened_at$/.test(said.field) && event.happened_at) {
        delete event.happened_at;
        return keep(id, JSON.stringify(event));
      }
      drop(id);
      const { code, field, detail } = said;
      if (onRefused) onRefused({ feedback_id: id, code, field, detail, event });
      else console.warn("rollwire: feedback refused", code, field, detail, event);
    };

    const batch = (most, without) => {
      const ids = [];
      let bytes = 0;
      for (const [id, text] of held) {
        if (without.has(id)) continue;
        bytes += 3 * text.length; // at most, in UTF-8
        if (ids.length === most || (ids.length && bytes > BYTES)) break;
        ids.push(id);
      }
      return [ids, "[" + ids.map((id) => held.get(id)).join() + "]"];
    };

    const later = (answer) => {
      const asked = answer && Number(answer.headers.get("retry-after"));
      const wait = 1e3 * Math.min(asked || 0, 300) + Math.random() * Math.min(CAP_MS, 200 * 2 ** failures++);
      clearTimeout(timer);
      timer = setTimeout(drain, wait);
    };

    const deliver = async () => {
      while (held.size) {
        const [ids, body] = batch(size, new Set());
        let answer, said;
        try {
          const signal = AbortSignal.timeout && AbortSignal.timeout(ANSWER_MS);
          const headers = { "content-type": "text/plain" };
          answer = await fetch(target, { method: "POST", headers, body, signal, keepalive: true });
          said = await answer.json();
        } catch { /* no answer, or none of a gateway: sent again */ }
        const status = answer ? answer.status : 0;
        const words = said && said.items;
        const passing = status < 400 || status >= 500 || [401, 403, 404, 405, 408, 425, 429].includes(status);
        if (words && words.length === ids.length) {
          let settled = 0;
          words.forEach((word, index) => {
            const passes = word.status === 408 || word.status === 425 || word.status === 429 || word.status >= 500;
            if (!held.has(ids[index]) || passes) return;
            settled++;
            if (word.code) refuse(ids[index], word);
            else drop(ids[index]);
          });
          if (!settled) return later(answer);
          failures = 0;
          size = BATCH;
        } else if (passing) {
          if (!failures) console.warn("rollwire: feedback waits", status, (said && said.code) || "");
          return later(answer);
        } else if (ids.length > 1) size = ids.length >> 1; // which one is it?
        else refuse(ids[0], said || { code: "http_" + status });
      }
    };
    const drain = () => (clearTimeout(timer), (busy = busy || deliver().finally(() => {
      busy = undefined;
      if (held.size && !failures) drain();
    })));

    const leave = () => {
      for (;;) {
        const [ids, body] = batch(BATCH, beaconed);
        if (!ids.length || !navigator.sendBeacon(target, new Blob([body], { type: "text/plain" }))) return;
        ids.forEach((id) => beaconed.add(id));
      }
    };
    addEventListener("pagehide", leave);
    document.addEventListener("visibilitychange", () => {
      if (document.visibilityState === "hidden") return leave();
      beaconed = new Set();
      drain();
    });
    addEventListener("online", drain);
    if (held.size) drain();

    const send = (event) => {
      if (!event.rollout_id || !event.signal) throw new TypeError("rollwire: rollout_id and signal are needed");
      if (held.size >= EVENTS) throw new RangeError("rollwire: " + EVENTS + " events wait; this one was not taken");
      const id = event.feedback_id || uuid7();
      const text = JSON.stringify({ ...event, feedback_id: id, happened_at: event.happened_at || new Date() });
      if (3 * text.length > BYTES) throw new RangeError("rollwire: the event is too large, and was not taken");
      keep(id, text);
      if (!busy && !failures) { clearTimeout(timer); timer = setTimeout(drain, lingerMs); }
      return id;
    };
    return { send, push: send, create, flush: async () => (await drain(), !held.size), get pending() { return held.size; } };
  };

  const script = document.currentScript;
  const early = window.rollwire;
  if (script && script.dataset.key) {
    window.rollwire = create({ url: script.src.replace(/\.js([?#].*)?$/, ""), key: script.dataset.key });
    if (Array.isArray(early)) early.forEach((event) => { try { window.rollwire.send(event); } catch (error) { console.warn(error); } });
  } else window.rollwire = { create };
})();
