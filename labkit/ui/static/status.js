// One line that says what is going on. The live region stays in place and only its text changes, so screen
// readers announce it; progress carries real ARIA values.
function render({ model, el }) {
  el.innerHTML =
    '<div class="labkit-status"><span class="lk-dot" aria-hidden="true"></span>' +
    '<span class="lk-status-text" role="status" aria-live="polite"></span>' +
    '<span class="lk-progress" role="progressbar" aria-label="progress" aria-valuemin="0" aria-valuemax="100"><i></i></span></div>';
  const [box, text, bar] = ["div", ".lk-status-text", ".lk-progress"].map((s) => el.querySelector(s));
  const draw = () => {
    const progress = model.get("progress");
    box.dataset.state = model.get("state");
    if (text.textContent !== model.get("text")) text.textContent = model.get("text");
    bar.hidden = progress < 0;
    bar.setAttribute("aria-valuenow", Math.round(100 * Math.max(0, progress)));
    bar.firstChild.style.width = 100 * Math.max(0, Math.min(1, progress)) + "%";
  };
  model.on("change", draw);
  draw();
  return () => model.off("change", draw);
}
export default { render };
