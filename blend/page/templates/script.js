"use strict";

// Light and dark: the button turns what the system prefers into the other.
const root = document.documentElement;
const button = document.querySelector("#theme");
const isDark = () => (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
const tell = () => { button.textContent = isDark() ? "Light colours" : "Dark colours"; };
button.addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  tell();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", tell);
button.hidden = false;
tell();

// Paper cannot be clicked: what is folded is printed open.
addEventListener("beforeprint", () => {
  for (const folded of document.querySelectorAll("details:not([open])")) {
    folded.open = true;
    folded.dataset.folded = "";
  }
});
addEventListener("afterprint", () => {
  for (const folded of document.querySelectorAll("details[data-folded]")) {
    folded.open = false;
    delete folded.dataset.folded;
  }
});

// Token maps: what the pointer or the keyboard is on is said above the tokens.
for (const map of document.querySelectorAll(".map")) {
  const output = map.querySelector("output");
  const list = map.querySelector(".tokens");
  const tokens = [...list.querySelectorAll("[data-state]")];
  const places = new Map(tokens.map((token, i) => [token, i]));
  const text = (token) => token.textContent === ""
    ? "part of the next token's character"
    : JSON.stringify(token.textContent.replaceAll("↵\n", "\n"));
  const score = (token) => {
    if (map.dataset.scored === undefined) return [];
    return [token.dataset.score === undefined ? "no score" : `score ${token.dataset.score}`];
  };

  const show = (token) => {
    const chunk = token.closest(".chunk");
    output.textContent = [
      text(token),
      token.dataset.state,
      ...score(token),
      chunk ? chunk.getAttribute("aria-label") : "outside chunks",
      `token ${places.get(token) + 1} of ${tokens.length}`,
    ].join(" · ");
  };
  const shown = (event) => {
    const token = event.target.closest("[data-state]");
    if (token) show(token);
  };
  // One stop of the tab key for all tokens; arrows go on from there.
  let current = 0;
  const go = (to) => {
    tokens[current].tabIndex = -1;
    current = Math.max(0, Math.min(tokens.length - 1, to));
    tokens[current].tabIndex = 0;
    tokens[current].focus();
  };
  const border = (step) => {
    const starts = [...list.querySelectorAll(".piece")].map((piece) => places.get(piece.querySelector("[data-state]")));
    return step > 0
      ? starts.find((start) => start > current) ?? tokens.length - 1
      : starts.findLast((start) => start < current) ?? 0;
  };
  const moves = {
    ArrowRight: () => current + 1,
    ArrowLeft: () => current - 1,
    ArrowDown: () => border(1),
    ArrowUp: () => border(-1),
    Home: () => 0,
    End: () => tokens.length - 1,
  };
  list.addEventListener("mouseover", shown);
  list.addEventListener("focusin", shown);
  list.addEventListener("click", (event) => {
    const token = event.target.closest("[data-state]");
    if (token) go(places.get(token));
  });
  list.addEventListener("keydown", (event) => {
    const move = moves[event.key];
    if (!move || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    go(move());
  });
}
