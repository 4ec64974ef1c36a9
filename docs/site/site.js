// Wide tables scroll in a box that the theme puts around them: with the keyboard, too.
const reach = () => {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])")) {
    box.tabIndex = 0;
  }
};
new MutationObserver(reach).observe(document.body, { childList: true, subtree: true });
reach();
