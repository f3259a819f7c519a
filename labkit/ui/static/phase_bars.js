// Draws what PhaseBars.state says: figures, the text so far, one bar a stage. Colours and patterns come from
// Python (theme.py), light and dark from the page (style.css). Nothing is fetched; text is never interpreted.
const make = (tag, className, parent) => {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (parent) parent.appendChild(node);
  return node;
};

// Keep a node's children in step with a list, re-using nodes so that widths glide instead of jumping.
function sync(parent, items, key, create, update) {
  const old = new Map([...parent.children].map((node) => [node.dataset.key, node]));
  items.forEach((item, at) => {
    const id = key(item);
    let node = old.get(id);
    if (!node) {
      node = create(item);
      node.dataset.key = id;
    }
    old.delete(id);
    if (parent.children[at] !== node) parent.insertBefore(node, parent.children[at] || null);
    update(node, item);
  });
  old.forEach((node) => node.remove());
}

const put = (node, text) => {
  if (node.textContent !== text) node.textContent = text;
};

function tile(node, item) {
  put(node.children[0], item.label);
  put(node.children[1].children[0], item.value);
  put(node.children[1].children[1], item.unit);
  put(node.children[2], item.note);
}

function newTile() {
  const node = make("div", "lk-tile");
  make("dt", "", node);
  const value = make("dd", "", node);
  make("span", "lk-value", value);
  make("span", "lk-unit", value);
  make("dd", "lk-tile-note", node);
  return node;
}

function newRow() {
  const node = make("div", "lk-stage");
  const head = make("div", "lk-stage-head", node);
  ["lk-stage-name", "lk-stage-note", "lk-stage-total"].forEach((name) => make("span", name, head));
  make("div", "lk-bar", node).setAttribute("role", "img");
  return node;
}

function render({ model, el }) {
  const root = make("div", "labkit lk-run", el);
  const tiles = make("dl", "lk-tiles", root);
  const text = make("div", "lk-text", root);
  text.setAttribute("role", "region");
  text.setAttribute("aria-label", model.get("text_label"));
  text.tabIndex = 0;
  const [prompt, answer, caret] = ["lk-prompt", "lk-answer", "lk-caret"].map((name) => make("span", name, text));
  const stages = make("div", "lk-stages", root);
  const legend = make("div", "lk-legend", root);
  legend.setAttribute("aria-hidden", "true");
  const looks = model.get("looks");
  const paint = (node, name) => {
    const look = looks[name] || looks.schedule;
    if (node.dataset.look !== name) Object.assign(node.style, { background: look.background, color: look.ink });
    node.dataset.look = name;
  };

  const draw = () => {
    const state = model.get("state");
    tiles.hidden = !(state.tiles || []).length;
    sync(tiles, state.tiles || [], (item) => item.label, newTile, tile);
    text.hidden = state.text === undefined;
    const atEnd = text.scrollHeight - text.scrollTop - text.clientHeight < 24;
    put(prompt, state.prompt || "");
    put(answer, state.text || "");
    caret.hidden = !state.running;
    if (atEnd) text.scrollTop = text.scrollHeight;
    root.dataset.running = state.running ? "yes" : "no";
    sync(stages, state.stages || [], (item) => item.name, newRow, (node, item) => {
      const [name, note, total] = node.firstChild.children;
      put(name, item.name);
      put(note, item.note);
      put(total, item.total);
      const bar = node.lastChild;
      bar.setAttribute("aria-label", item.summary);
      bar.classList.toggle("is-empty", !item.segments.length);
      const width = bar.clientWidth;
      const fresh = () => make("span", "lk-segment", undefined);
      sync(bar, item.segments, (segment) => segment.name, fresh, (piece, segment) => {
        paint(piece, segment.name);
        piece.style.flexGrow = segment.share.toFixed(4);
        piece.title = segment.title;
        const room = segment.share * width;
        const percent = Math.round(100 * segment.share) + " %";
        const letter = 0.576 * parseFloat(getComputedStyle(piece).fontSize || 12.5);
        const need = letter * segment.label.replace(/[^\x00-\u02ff]/g, "xx").length + 14; // a Chinese sign is as wide as two
        put(piece, room > need + 5.6 * letter ? segment.label + "  " + percent : room > need ? segment.label : "");
      });
    });
    sync(legend, state.legend || [], (item) => item.name, () => {
      const node = make("span", "lk-key");
      make("i", "", node);
      make("span", "", node);
      return node;
    }, (node, item) => {
      paint(node.firstChild, item.name);
      put(node.lastChild, item.label);
    });
  };
  model.on("change:state", draw);
  const watcher = new ResizeObserver(draw);
  watcher.observe(root);
  draw();
  return () => {
    model.off("change:state", draw);
    watcher.disconnect();
  };
}
export default { render };
