// Checks one page of the site in an iframe of check_site.py: what a reader with a phone, a keyboard or a screen reader meets.

function channel(v) { v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; }
function luminance([r, g, b]) { return 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b); }
function parsed(text) {
  const n = (text.match(/[\d.]+/g) || [0, 0, 0, 0]).map(Number);
  return text.startsWith("color(srgb") ? [n[0] * 255, n[1] * 255, n[2] * 255, n[3] ?? 1] : [n[0], n[1], n[2], n[3] ?? 1];
}
function over(top, below) { return [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3])); }

function background(element, view) {
  const layers = [];
  for (let e = element; e; e = e.parentElement) {
    const color = parsed(view.getComputedStyle(e).backgroundColor);
    if (color[3] > 0) layers.push(color);
    if (color[3] === 1) break;
  }
  return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
}

function contrasts(doc, view, theme) {
  const found = new Map();
  const walker = doc.createTreeWalker(doc.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    if (element.closest("script,style,noscript,svg,[aria-hidden=true],a.headerlink,.visually-hidden,.skip-to-content")) continue;
    const style = view.getComputedStyle(element), below = background(element, view);
    const color = over(parsed(style.color), below);
    const [a, b] = [luminance(color), luminance(below)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05), size = parseFloat(style.fontSize);
    const least = size >= 24 || (size >= 18.66 && style.fontWeight >= 700) ? 3 : 4.5;
    if (ratio < least - 0.01) {
      const name = `${element.tagName.toLowerCase()}.${element.className}`;
      found.set(name, `${theme}: contrast ${ratio.toFixed(2)} of ${name} '${walker.currentNode.data.trim().slice(0, 30)}'`);
    }
  }
  return [...found.values()];
}

function named(element) {
  return (element.textContent + (element.getAttribute("aria-label") || "") + (element.title || "")).trim()
    || [...element.querySelectorAll("img[alt],[aria-label],title")].length > 0;
}

function structure(doc) {
  const problems = [], all = selector => [...doc.querySelectorAll(selector)];
  if (!doc.documentElement.lang) problems.push("no language");
  if (!doc.querySelector("meta[name=viewport]")) problems.push("no viewport");
  if (!doc.querySelector("main,[role=main]")) problems.push("no main landmark");
  if (!doc.querySelector("nav,[role=navigation]")) problems.push("no navigation landmark");
  for (const image of all("img")) if (!image.hasAttribute("alt")) problems.push(`no alt: ${image.src.slice(-60)}`);
  for (const image of all("svg[role=img]")) if (!image.getAttribute("aria-label")) problems.push("an svg without a label");
  const levels = all("article h1,article h2,article h3,article h4,article h5").map(h => Number(h.tagName[1]));
  if (levels.filter(n => n === 1).length !== 1) problems.push(`${levels.filter(n => n === 1).length} h1`);
  levels.forEach((n, i) => { if (i && n > levels[i - 1] + 1) problems.push(`h${n} after h${levels[i - 1]}`); });
  for (const e of all("article a[href],button")) if (!named(e)) problems.push(`no name: ${e.outerHTML.slice(0, 80)}`);
  for (const input of all("input:not([type=hidden],[type=checkbox])"))
    if (!input.labels?.length && !input.getAttribute("aria-label") && !input.placeholder) problems.push(`no label: ${input.name}`);
  for (const table of all("article table")) if (!table.querySelector("th")) problems.push("a table without headings");
  const ids = all("[id]").map(e => e.id);
  for (const id of new Set(ids.filter((id, i) => id && ids.indexOf(id) !== i))) problems.push(`id twice: ${id}`);
  return problems;
}

async function check(url, width) {
  const frame = document.createElement("iframe");
  frame.style = `width:${width}px;height:900px;border:0`;
  frame.src = url;
  await new Promise(done => { frame.onload = done; document.body.append(frame); });
  const doc = frame.contentDocument, view = frame.contentWindow, problems = [];
  if (width < 1000) {
    const wide = doc.documentElement.scrollWidth;
    if (wide > width + 1) problems.push(`${wide} px wide`);
  } else problems.push(...structure(doc));
  for (const theme of ["light", "dark"]) {
    doc.body.dataset.theme = theme;
    problems.push(...contrasts(doc, view, theme));
  }
  frame.remove();
  return problems.map(problem => `${url} at ${width}: ${problem}`);
}

async function main() {
  const pages = await (await fetch("/pages.json")).json(), problems = [];
  for (const page of pages)
    for (const width of [1280, 390])
      try { problems.push(...await check(page, width)); } catch (error) { problems.push(`${page}: ${error}`); }
  await fetch("/done", { method: "POST", body: JSON.stringify(problems) });
}

main();
