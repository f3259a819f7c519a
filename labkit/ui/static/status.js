// One line that says what is going on. The live region stays in place and only its text changes, so screen readers
// announce it; progress carries real ARIA values; the seconds that pass are for the eye alone.
const QUIET_MS = 30000;

// A JupyterLab page takes arrow keys and letters for its own commands wherever it thinks nobody types: in a menu, at a
// radio button, on a slider. Inside a panel they belong to the control. Shift+Enter and Ctrl+S stay the page's.
function keepKeys(event) {
  const forThePage = event.ctrlKey || event.metaKey || event.altKey || (event.shiftKey && event.key === "Enter");
  if (!forThePage) event.stopPropagation();
}
// A slider's caption stands beside it, and nothing ties the two together for those who cannot see it.
function nameSliders() {
  document.querySelectorAll(".labkit .noUi-handle:not([aria-label])").forEach((handle) => {
    const caption = handle.closest(".widget-hslider")?.querySelector(".widget-label")?.textContent.trim();
    if (caption) handle.setAttribute("aria-label", caption);
  });
}

if (!window.labkitAround) {
  window.labkitAround = true;
  window.addEventListener("focusin", (event) => {
    event.target.closest?.(".labkit.lk-panel")?.addEventListener("keydown", keepKeys);
  });
  let due = false;
  new MutationObserver(() => {
    if (due) return;
    due = true;
    setTimeout(() => { due = false; nameSliders(); }, 300);
  }).observe(document.body, { childList: true, subtree: true });
}

function render({ model, el }) {
  el.innerHTML =
    '<div class="labkit-status"><span class="lk-dot" aria-hidden="true"></span><span>' +
    '<span class="lk-status-text" role="status" aria-live="polite"></span><span class="lk-seconds" aria-hidden="true"></span>' +
    '</span><span class="lk-progress" role="progressbar" aria-valuemin="0" aria-valuemax="100"><i></i></span>' +
    '<span class="lk-advice" role="status" hidden></span></div>';
  const [box, text, seconds, bar, note] = ["div", ".lk-status-text", ".lk-seconds", ".lk-progress", ".lk-advice"].map(
    (s) => el.querySelector(s));
  const words = model.get("words");
  bar.setAttribute("aria-label", words.progress);
  const advice = () => (document.body.dataset.voila ? words.voila : words.notebook);
  let heard = Date.now();
  const waits = () => ["running", "loading"].includes(model.get("state"));
  const draw = () => {
    const [progress, passed] = [model.get("progress"), model.get("seconds")];
    heard = Date.now();
    note.hidden = true;
    box.dataset.state = model.get("state");
    if (text.textContent !== model.get("text")) text.textContent = model.get("text");
    seconds.textContent = waits() && passed > 1 ? ` ${passed} s` : "";
    bar.hidden = progress < 0;
    bar.setAttribute("aria-valuenow", Math.round(100 * Math.max(0, progress)));
    bar.firstChild.style.width = 100 * Math.max(0, Math.min(1, progress)) + "%";
  };
  const warn = (advised) => {
    if (!waits() || !note.hidden) return;
    note.textContent = advised;
    note.hidden = false;
  };
  // On a restart the page drops its line to the kernel, and says so by this event; elsewhere silence is the sign.
  const cut = () => warn(advice());
  const watch = setInterval(() => {
    if (Date.now() - heard > QUIET_MS) {
      warn(`${words.silence.replace("%", Math.round((Date.now() - heard) / 1000))} ${advice()}`);
    }
  }, 5000);
  model.on("change", draw);
  model.on("comm_live_update", cut);
  draw();
  setTimeout(() => {
    nameSliders();
    el.closest(".lk-panel")?.setAttribute("lang", words.language);
  }, 300);
  return () => {
    clearInterval(watch);
    model.off("change", draw);
    model.off("comm_live_update", cut);
  };
}
export default { render };
