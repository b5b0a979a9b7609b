// Draws the attention of a line of a report with attention_view.js, when somebody opens it.
"use strict";
for (const line of document.querySelectorAll("details.attention")) {
  line.addEventListener("toggle", () => {
    const view = line.querySelector("div");
    if (line.open && !view.hasChildNodes()) {
      nmtAttention.show(view, JSON.parse(line.querySelector("script").textContent));
    }
  });
}
