"use strict";
// Search as one types, keys, and buttons that copy. Pages are whole without it.
(() => {
  const box = document.getElementById("q");
  const said = document.getElementById("said");
  const typing = (element) => element.matches("input, textarea, select, [contenteditable]");
  const plain = (text) => text.toLowerCase().split(/\s+/).filter(Boolean).join(" ");

  document.documentElement.classList.add("js");
  if (document.getElementById("results")) list();
  for (const figure of document.querySelectorAll("figure.code")) {
    const label = figure.querySelector("figcaption span").textContent.toLowerCase();
    copier(figure.querySelector("pre code"), figure.querySelector("figcaption"), label);
  }
  for (const text of document.querySelectorAll("[data-copy]")) {
    copier(text, text.parentElement, text.matches("code") ? "id" : "message");
  }
  document.addEventListener("keydown", shortcut);

  function shortcut(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || typing(event.target)) return;
    if (event.key === "/" && box) {
      event.preventDefault();
      box.focus();
      box.select();
    }
    const way = { ArrowLeft: "prev", ArrowRight: "next" }[event.key];
    if (way && document.activeElement === document.body) {
      document.querySelector(`.pager [rel=${way}]`)?.click();
    }
  }

  function copier(source, place, what) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.textContent = "Copy";
    button.setAttribute("aria-label", `Copy ${what}`);
    button.addEventListener("click", async () => {
      const done = await copied(source.textContent.trimEnd());
      button.textContent = done ? "Copied" : "Failed";
      const news = done ? `Copied ${what}` : `Could not copy ${what}`;
      said.textContent = news;
      setTimeout(() => {
        button.textContent = "Copy";
        if (said.textContent === news) said.textContent = ""; // not what another button said since
      }, 1600);
    });
    place.append(button);
  }

  async function copied(text) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      return copiedTheOldWay(text); // pages from plain http have no clipboard
    }
  }

  function copiedTheOldWay(text) {
    const area = document.createElement("textarea");
    const before = document.activeElement;
    area.value = text;
    area.className = "unseen";
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    before?.focus();
    return done;
  }

  function list() {
    const results = document.getElementById("results");
    const count = document.getElementById("count");
    const none = document.getElementById("none");
    const clear = document.getElementById("clear");
    const form = box.form;
    const filters = ["project", "exception", "argument"].map((name) => form.elements[name]);
    const items = [...results.children].map(read).sort((a, b) => a.at - b.at);

    const query = new URLSearchParams(location.search);
    for (const field of [box, ...filters]) field.value = query.get(field.name) ?? "";
    for (const filter of filters) if (filter.selectedIndex < 0) filter.value = "";
    const server = "server" in form.dataset; // which has searched already, and by likeness too
    if (location.search && !server) show();
    else paint();

    box.addEventListener("input", show);
    for (const filter of filters) filter.addEventListener("change", show);
    form.addEventListener("submit", (event) => {
      if (server && !links().length) return;
      event.preventDefault();
      links()[0]?.focus();
    });
    clear.addEventListener("click", () => {
      for (const field of [box, ...filters]) field.value = "";
      show();
      box.focus();
    });
    box.addEventListener("keydown", (event) => {
      if (event.key === "ArrowDown") go(event, 0);
    });
    results.addEventListener("keydown", move);
    clear.hidden = !active();

    function read(element) {
      const item = element.firstElementChild;
      const title = item.querySelector("h2");
      const message = item.querySelector(".said");
      return {
        element,
        at: Number(item.dataset.at),
        data: item.dataset,
        keys: plain(item.dataset.names).split(" ").slice(0, 2),
        message: plain(message.textContent),
        fields: [
          [8, plain(title.textContent)],
          [6, plain(message.textContent)],
          [5, plain(item.dataset.names)],
          [1, plain(item.dataset.rest)],
        ],
        shown: [title.querySelector("a"), message],
      };
    }

    function active() {
      return [box, ...filters].some((field) => field.value);
    }

    function admits(item) {
      const [project, exception, argument] = filters.map((filter) => filter.value);
      return (
        (!project || item.data.project === project) &&
        (!exception || item.data.exception === exception) &&
        (!argument || item.data.arguments.split(" ").includes(argument))
      );
    }

    function show() {
      const text = plain(box.value);
      const candidates = items.filter(admits);
      let found = best(candidates, (item) => points(words(), item));
      if (!found.length) found = best(candidates, (item) => quoted(text, item.message));
      for (const item of items) item.element.hidden = true;
      for (const item of found) item.element.hidden = false;
      results.append(...found.map((item) => item.element));
      count.textContent = found.length === 1 ? "1 error" : `${found.length} errors`;
      none.hidden = found.length > 0;
      if (server) none.textContent = "Nothing found. Enter compares the text with every message.";
      clear.hidden = !active();
      paint();
      remember();
    }

    function best(candidates, score) {
      return candidates
        .map((item) => [score(item), item])
        .filter(([found]) => found)
        .sort(([a, x], [b, y]) => b - a || x.at - y.at)
        .map(([, item]) => item);
    }

    function words() {
      return plain(box.value).split(" ").filter(Boolean);
    }

    function points(wanted, item) {
      let score = 1;
      for (const word of wanted) {
        const places = item.fields.filter(([, text]) => text.includes(word));
        if (!places.length) return 0;
        const weight = Math.max(...places.map(([each]) => each));
        score += item.keys.includes(word) ? 100 : weight;
      }
      return score;
    }

    function quoted(text, message) {
      let at = 0;
      let letters = 0;
      let whole = 0;
      for (const piece of message.split(/\{[^{}]*\}/).map((part) => part.trim())) {
        whole += piece.length;
        const start = piece ? text.indexOf(piece, at) : -1;
        if (start < 0) continue;
        at = start + piece.length;
        letters += piece.length;
      }
      return letters >= Math.max(16, 0.6 * whole) ? letters : 0;
    }

    function paint() {
      if (!globalThis.Highlight || !CSS.highlights) return;
      const ranges = [];
      const parts = items.filter((item) => !item.element.hidden).flatMap((item) => item.shown);
      for (const node of parts.map((part) => part.firstChild)) {
        const text = node?.textContent.toLowerCase() ?? "";
        if (text.length !== node?.length) continue; // a letter that lower case makes two
        for (const word of words().filter((each) => each.length > 1)) {
          for (let at = text.indexOf(word); at >= 0; at = text.indexOf(word, at + word.length)) {
            const range = document.createRange();
            range.setStart(node, at);
            range.setEnd(node, at + word.length);
            ranges.push(range);
          }
        }
      }
      CSS.highlights.set("found", new Highlight(...ranges));
    }

    function remember() {
      const query = new URLSearchParams();
      for (const field of [box, ...filters]) if (field.value) query.set(field.name, field.value);
      const address = query.size ? `?${query}` : location.pathname;
      try {
        history.replaceState(null, "", address);
      } catch {
        // some browsers refuse this for files
      }
    }

    function links() {
      return [...results.querySelectorAll("li:not([hidden]) h2 a")];
    }

    function go(event, to) {
      const all = links();
      event.preventDefault();
      if (to < 0) box.focus();
      else all[Math.min(to, all.length - 1)]?.focus();
    }

    function move(event) {
      const at = links().indexOf(event.target);
      if (at < 0) return;
      const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: Infinity, Escape: -1 }[event.key];
      if (to !== undefined) go(event, to);
    }
  }
})();
