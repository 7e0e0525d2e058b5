// Runs before the first paint, so that a chosen theme never flashes in the other's colours.
// A classic script on purpose: modules run too late for that.
(() => {
  const KEY = "qinfer.theme";
  const read = () => {
    try {
      const value = localStorage.getItem(KEY);
      return value === "light" || value === "dark" ? value : "system";
    } catch {
      return "system"; // storage is switched off
    }
  };
  const apply = (value) => {
    if (value === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = value;
  };
  apply(read());
  window.qinferTheme = {
    read,
    set(value) {
      try {
        localStorage.setItem(KEY, value);
      } catch {
        // not kept, but shown
      }
      apply(value);
    },
  };
})();
