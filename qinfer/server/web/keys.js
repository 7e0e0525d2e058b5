// Entering an API key, when the server wants one.

import { hasKey, onKeyWanted, setKey } from "./api.js";
import { $ } from "./dom.js";

let waiting = null; // one dialog for all requests that were refused

/** Show the dialog whenever the server answers 401. */
export function installKeyDialog() {
  onKeyWanted((refusal) => (waiting ??= ask(refusal).finally(() => (waiting = null))));
}

function ask(refusal) {
  const dialog = $("key-dialog");
  $("key-error").hidden = !refusal;
  $("key-error").textContent = refusal ?? "";
  $("key").value = "";
  dialog.showModal();
  $("key").focus();
  return new Promise((resolve) => {
    let given = false;
    const use = (event) => {
      event.preventDefault(); // the page sends no forms
      setKey($("key").value.trim(), $("key-remember").checked);
      given = hasKey();
      dialog.close();
    };
    const cancel = () => dialog.close();
    $("key-form").addEventListener("submit", use);
    $("key-cancel").addEventListener("click", cancel);
    dialog.addEventListener("close", () => {
      $("key-form").removeEventListener("submit", use);
      $("key-cancel").removeEventListener("click", cancel);
      resolve(given);
    }, { once: true });
  });
}
