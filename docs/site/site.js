// What the theme makes when a page is open, made plain to keyboards and screen readers.
const mend = () => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  for (const buttons of document.querySelectorAll("nav.md-code__nav")) {
    buttons.setAttribute("role", "none");
  }
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
  }
};
new MutationObserver(mend).observe(document.body, { childList: true, subtree: true });
addEventListener("resize", mend);
mend();
