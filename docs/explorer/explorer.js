// The page of structures: choose one, see K, K Kᵀ and its inverse, what it takes and what it costs. All numbers
// come from structures.js; here are controls, canvases and tables.
"use strict";

(() => {
  const EXAMPLES = ["upper(dense(2),tril_toeplitz)", "lower(block_diagonal(4,8),diagonal)",
    "upper(tril(6),lower(diagonal,dense(2)))"];
  const SHOWN_NUMBERS = { block: 4, rank: 1, first: 3, last: 3 }; // sizes that can be seen, not the defaults
  const CHOICES = [8, 12, 16, 24, 32, 48];
  const PICTURES = [["k", "K"], ["square", "K Kᵀ"], ["inverse", "(K Kᵀ)⁻¹"]];

  const root = document.getElementById("structure-explorer");
  if (!root) return;

  // --- The page ------------------------------------------------------------------------------------------------

  function make(tag, attributes = {}, ...children) {
    const element = Object.assign(document.createElement(tag), attributes);
    element.append(...children);
    return element;
  }

  const labelled = (text, control) => make("label", {}, make("span", { textContent: text }), control);
  const number = (id, value, most) =>
    make("input", { id, type: "number", min: 1, max: most, step: 1, value, inputMode: "numeric" });

  const names = make("select", { id: "ex-name" });
  for (const name of Object.keys(Structures.BUILDERS))
    if (!Structures.BUILDERS[name].parts) names.append(new Option(name.replaceAll("_", " "), name));
  const composed = make("optgroup", { label: "composed" });
  for (const text of EXAMPLES) composed.append(new Option(text, text));
  names.append(composed);

  const own = make("span", { id: "ex-own" });
  const text = make("input", { id: "ex-text", type: "text", spellcheck: false, autocomplete: "off" });
  const dims = make("select", { id: "ex-dim" });
  for (const dim of CHOICES) dims.append(new Option(`${dim} × ${dim}`, dim, dim === 16, dim === 16));
  const shuffle = make("button", { id: "ex-shuffle", type: "button", textContent: "Other entries" });
  const complaint = make("p", { id: "ex-error", role: "alert" });

  const canvases = {}, captions = {};
  const pictures = make("div", { id: "ex-pictures" });
  for (const [key, title] of PICTURES) {
    canvases[key] = make("canvas", { id: `ex-${key}` });
    canvases[key].setAttribute("role", "img");
    captions[key] = make("small");
    pictures.append(make("figure", {}, make("figcaption", { textContent: title }), canvases[key], captions[key]));
  }
  const pointed = make("p", { id: "ex-pointed" });

  const layer = {
    inputs: number("ex-inputs", 1024, 1e5), outputs: number("ex-outputs", 1024, 1e5),
    rows: number("ex-rows", 4096, 1e8), every: number("ex-every", 20, 1e6),
  };
  const memory = make("table", { id: "ex-memory" }), operations = make("table", { id: "ex-operations" });
  const code = make("code", { id: "ex-code" });
  const size = make("select", { id: "ex-bytes" });
  size.append(new Option("float32", 4), new Option("bfloat16", 2));

  root.replaceChildren(
    make("div", { className: "ex-controls" },
      labelled("Structure", names), own, labelled("As text", text), labelled("Picture", dims), shuffle),
    complaint, pictures, pointed,
    make("p", {}, code),
    make("h2", { id: "memory-and-cost", textContent: "Memory and cost" }),
    make("p", { textContent: "Of a linear layer without a bias, with this structure for K and for C:" }),
    make("div", { className: "ex-controls" },
      labelled("Inputs", layer.inputs), labelled("Outputs", layer.outputs), labelled("Rows in a batch", layer.rows),
      labelled("Factors every … steps", layer.every), labelled("State in", size)),
    make("div", { className: "ex-tables" }, memory, operations));

  // --- Text and controls say the same --------------------------------------------------------------------------

  function offerNumbers() {
    own.replaceChildren();
    const builder = Structures.BUILDERS[names.value];
    for (const name of Object.keys(builder?.own ?? {})) {
      const control = number(`ex-${name}`, SHOWN_NUMBERS[name], 48);
      control.addEventListener("input", writeText);
      own.append(labelled(name, control));
    }
  }

  function writeText() {
    const numbers = [...own.querySelectorAll("input")].map((control) => Math.max(1, Math.trunc(control.value) || 1));
    text.value = names.value + (numbers.length ? `(${numbers.join(",")})` : "");
    show();
  }

  // --- Pictures ------------------------------------------------------------------------------------------------

  let seed = 1;
  let shown = null; // what is on the canvases

  const COLOURS = { positive: [0, 114, 178], negative: [213, 94, 0] };
  const ZERO = { light: [242, 242, 242], dark: [44, 48, 58] };
  const DARK_COLOURS = { positive: [64, 165, 230], negative: [240, 130, 50] };

  const isDark = () => document.body.getAttribute("data-md-color-scheme") === "slate";

  function draw(canvas, matrix, dim) {
    const zero = isDark() ? ZERO.dark : ZERO.light, signs = isDark() ? DARK_COLOURS : COLOURS;
    const largest = matrix.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
    const empty = Structures.isZero(matrix), pixels = new ImageData(dim, dim);
    let filled = 0;
    matrix.forEach((value, at) => {
      // What is not zero is far enough from it to be seen.
      const strength = empty(at) ? 0 : 0.3 + 0.7 * Math.sqrt(Math.abs(value) / largest);
      filled += !empty(at);
      const sign = value > 0 ? signs.positive : signs.negative;
      const colour = zero.map((channel, i) => channel + strength * (sign[i] - channel));
      pixels.data.set([...colour, 255], 4 * at);
    });
    canvas.width = canvas.height = dim; // CSS makes the pixels large
    canvas.getContext("2d").putImageData(pixels, 0, 0);
    return filled;
  }

  function point(event) {
    const { dim, matrices } = shown, box = event.target.getBoundingClientRect();
    const place = (at, from, length) => Math.min(dim - 1, Math.max(0, Math.floor(((at - from) / length) * dim)));
    const row = place(event.clientY, box.top, box.height), column = place(event.clientX, box.left, box.width);
    pointed.textContent = `Row ${row + 1}, column ${column + 1}: ` + PICTURES.map(([key, title]) => {
      const at = row * dim + column, value = Structures.isZero(matrices[key])(at) ? 0 : matrices[key][at];
      return `${title} ${value.toPrecision(3)}`;
    }).join(", ");
  }

  // --- Tables --------------------------------------------------------------------------------------------------

  const whole = (count) => count.toLocaleString("en-US");

  function readable(bytes) {
    for (const unit of ["B", "KiB", "MiB"]) {
      if (bytes < 1024) return `${unit === "B" ? bytes : bytes.toFixed(1)} ${unit}`;
      bytes /= 1024;
    }
    return `${bytes.toFixed(2)} GiB`;
  }

  function operationsText(flops) {
    for (const unit of ["", "k", "M", "G", "T"]) {
      if (flops < 1000) return `${unit ? Number(flops.toPrecision(3)) : Math.round(flops)} ${unit}flop`;
      flops /= 1000;
    }
    return `${flops.toFixed(0)} Pflop`;
  }

  function fill(table, head, rows) {
    const cells = (kind, row) => make("tr", {}, ...row.map((cell) => make(kind, { textContent: cell })));
    table.replaceChildren(make("thead", {}, cells("th", head)), make("tbody", {}, ...rows.map((row) => cells("td", row))));
  }

  function show() {
    complaint.textContent = "";
    const dim = Number(dims.value);
    const chosen = Object.fromEntries(
      Object.entries(layer).map(([name, control]) => [name, Math.max(1, Math.trunc(control.value) || 1)]));
    let structure, costs, inFull;
    try {
      structure = Structures.bind(text.value, dim);
      costs = Structures.costs(text.value, chosen);
      inFull = Structures.costs("dense", chosen);
    } catch (error) {
      complaint.textContent = `${error.message}.`;
      return;
    }
    shown = { dim, matrices: Structures.matrices(structure, seed) };
    for (const [key, title] of PICTURES) {
      const filled = draw(canvases[key], shown.matrices[key], dim);
      captions[key].textContent = `${filled} of ${dim * dim} places differ from zero`
        + (key === "k" ? `, ${structure.numel} free` : "");
      canvases[key].setAttribute("aria-label", `${title} of ${text.value}: ${captions[key].textContent}`);
    }
    pointed.textContent = "Point at a picture to read its numbers.";
    code.textContent = `SINGD(model, structure="${text.value}")`;

    const bytes = Number(size.value), share = (part, of) => `${Number(((100 * part) / of).toPrecision(3))} %`;
    const line = (name, entries) =>
      [name, whole(entries), readable(bytes * entries), share(entries, costs.adamw)];
    fill(memory, ["state", "entries", "memory", "of AdamW’s"], [
      line("K, for the inputs", costs.k), line("C, for the outputs", costs.c),
      line("momentum", costs.weights), line("together", costs.state),
      line("with dense factors", inFull.state), line("AdamW", costs.adamw)]);
    const work = (name, flops) => [name, operationsText(flops), share(flops, costs.passes)];
    fill(operations, ["operations", "", "of forward and backward"], [
      work("natural gradient", costs.gradient), work("update of the factors", costs.update),
      work("statistics of a batch", costs.statistics), work("a step, in the mean", costs.perStep),
      work("with dense factors", inFull.perStep), work("forward and backward", costs.passes)]);
  }

  // --- Events --------------------------------------------------------------------------------------------------

  names.addEventListener("change", () => { offerNumbers(); writeText(); });
  shuffle.addEventListener("click", () => { seed += 1; show(); });
  for (const control of [text, dims, size, ...Object.values(layer)]) control.addEventListener("input", show);
  for (const canvas of Object.values(canvases)) {
    canvas.addEventListener("pointermove", point);
    canvas.addEventListener("pointerdown", point);
  }
  new MutationObserver(show).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });

  names.value = "hierarchical";
  offerNumbers();
  writeText();
})();
