// Keeps the latest text in view, unless the reader has scrolled up.

const NEAR = 48; // px from the end that still count as being there

export class Scroller {
  constructor(element, button) {
    this.element = element;
    this.button = button;
    this.isFollowing = true;
    element.addEventListener("scroll", () => this.#look(), { passive: true });
    button.addEventListener("click", () => this.toEnd());
    new ResizeObserver(() => this.follow()).observe(element);
  }

  /** Go to the end if the reader was there. */
  follow() {
    if (this.isFollowing) this.element.scrollTop = this.element.scrollHeight;
    this.#look();
  }

  toEnd() {
    this.isFollowing = true;
    this.follow();
  }

  #look() {
    const { scrollTop, scrollHeight, clientHeight } = this.element;
    this.isFollowing = scrollHeight - scrollTop - clientHeight < NEAR;
    this.button.hidden = this.isFollowing;
  }
}
