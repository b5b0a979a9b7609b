// Gives each cell the heading of its column, which narrow-tables.css shows where rows are stacked.
addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll(".md-typeset table")) {
    const headings = [...table.querySelectorAll("thead th")].map(cell => cell.textContent)
    for (const row of table.querySelectorAll("tbody tr"))
      [...row.cells].forEach((cell, i) => (cell.dataset.heading = headings[i] ?? ""))
  }
})
