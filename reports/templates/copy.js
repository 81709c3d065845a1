// What the Copy buttons do, also on a page without a map.
async function copy(button) {
  let done = true;
  try {
    await navigator.clipboard.writeText(button.dataset.copy);
  } catch (refused) {
    const area = make("textarea", { class: "unseen" });
    area.value = button.dataset.copy;
    document.body.append(area);
    area.select();
    done = document.execCommand("copy");
    area.remove();
  }
  button.textContent = done ? "Copied" : "Select it by hand";
  setTimeout(() => { button.textContent = "Copy"; }, 2000);
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-copy]");
  if (button) copy(button);
});
