// The structures of ingot.structures, as far as pictures and counts need them: which text means what, how many
// entries an element has, where they stand, and what products cost. tests/site/test_explorer.py holds all of it
// against the library, for every structure that is registered there.
"use strict";

const Structures = (() => {
  // --- What a structure knows ------------------------------------------------------------------------------
  //
  // numel            entries of an element
  // flops(n)         operations of A X for n columns
  // product          operations of A B
  // square           entries of A Aᵀ where these have a compact form, or null
  // gramFirst(n)     whether statistics of n rows are taken from their Gram matrix
  // fill(put, draw)  puts an element's entries into their places: put(row, column, value)

  const dense = (dim) => ({
    text: `dense(${dim})`, dim, numel: dim * dim, square: dim * dim, product: 2 * dim ** 3,
    flops: (n) => 2 * dim * dim * n,
    gramFirst: (n) => n > 1.6 * dim,
    fill: (put, draw) => block(dim, dim, (i, j) => put(i, j, (i === j) + draw())),
  });

  const diagonal = (dim) => ({
    text: `diagonal(${dim})`, dim, numel: dim, square: dim, product: 2 * dim,
    flops: (n) => 2 * dim * n,
    gramFirst: () => true,
    fill: (put, draw) => block(dim, 1, (i) => put(i, i, 1 + draw())),
  });

  const blockDiagonal = (dim, wanted) => {
    const size = Math.min(wanted, dim), tail = dim % size, full = (dim - tail) / size;
    const numel = full * size ** 2 + tail ** 2;
    return {
      text: `block_diagonal(${size},${dim})`, dim, numel, square: numel,
      product: 2 * numel * Math.ceil(numel / dim),
      flops: (n) => 2 * numel * n,
      gramFirst: (n) => n > 1.6 * size,
      fill: (put, draw) => {
        for (let at = 0; at < dim; at += size) dense(Math.min(size, dim - at)).fill(shifted(put, at), draw);
      },
    };
  };

  const triangular = (dim, upper) => ({
    text: `${upper ? "triu" : "tril"}(${dim})`, dim, numel: (dim * (dim + 1)) / 2, square: dim * dim,
    product: 2 * dim ** 3, // by way of the full matrix
    flops: (n) => 2 * dim * dim * n,
    gramFirst: () => false,
    fill: (put, draw) => block(dim, dim, (i, j) => {
      if (upper ? j >= i : j <= i) put(i, j, (i === j) + draw());
    }),
  });

  const toeplitz = (dim, upper) => {
    const length = fftLength(2 * dim - 1), transform = 2.5 * length * Math.log2(Math.max(2, length));
    const flops = (n) => roundHalfToEven((2 * n + 1) * transform + 3 * length * n);
    return {
      text: `${upper ? "triu" : "tril"}_toeplitz(${dim})`, dim, numel: dim, square: null,
      product: flops(1), flops,
      gramFirst: () => false,
      fill: (put, draw) => {
        const values = Array.from({ length: dim }, (_, k) => (k === 0) + draw());
        block(dim, dim, (i, j) => {
          if (upper ? j >= i : j <= i) put(i, j, values[Math.abs(i - j)]);
        });
      },
    };
  };

  // [[first, B], [0, second]] or [[first, 0], [B, second]].
  const beside = (first, second, upper) => {
    const between = first.dim * second.dim;
    return {
      text: `${upper ? "upper" : "lower"}(${first.text},${second.text})`, dim: first.dim + second.dim,
      numel: first.numel + between + second.numel, square: null,
      product: first.product + first.flops(second.dim) + second.flops(first.dim) + second.product,
      flops: (n) => first.flops(n) + 2 * between * n + second.flops(n),
      gramFirst: () => false,
      fill: (put, draw) => {
        first.fill(put, draw);
        second.fill(shifted(put, first.dim), draw);
        block(first.dim, second.dim, (i, j) => {
          if (upper) put(i, first.dim + j, draw());
          else put(first.dim + j, i, draw());
        });
      },
    };
  };

  // Full rows above and below another structure: [[A, B, E], [0, middle, 0], [0, B', J]].
  const hierarchical = (first, middle, last) => {
    const border = first + last, dim = border + middle.dim, below = first + middle.dim;
    const inner = last ? `lower(${middle.text},dense(${last}))` : middle.text;
    return {
      first, middle, last, dim, isHierarchical: true,
      text: first ? `upper(dense(${first}),${inner})` : inner,
      numel: first * dim + last * (dim - first) + middle.numel,
      square: middle.square === null ? null : border * dim + middle.square,
      product: 2 * border * border * dim + middle.flops(border) + middle.product,
      flops: (n) => 2 * border * dim * n + middle.flops(n),
      gramFirst: (n) => n > 1.6 * border && middle.gramFirst(n),
      fill: (put, draw) => {
        block(first, dim, (i, j) => put(i, j, (i === j) + draw()));
        middle.fill(shifted(put, first), draw);
        block(last, dim - first, (i, j) => put(below + i, first + j, (below + i === first + j) + draw()));
      },
    };
  };

  const shifted = (put, at) => (i, j, value) => put(at + i, at + j, value);

  function block(rows, columns, visit) {
    for (let i = 0; i < rows; i++) for (let j = 0; j < columns; j++) visit(i, j);
  }

  function fftLength(least) {
    for (let length = least; ; length++) {
      let rest = length;
      for (const prime of [2, 3, 5]) while (rest % prime === 0) rest /= prime;
      if (rest === 1) return length;
    }
  }

  const roundHalfToEven = (x) => (x % 1 === 0.5 ? 2 * Math.round(x / 2) : Math.round(x)); // as Python rounds

  // --- Names -----------------------------------------------------------------------------------------------

  const sized = (name, size) => Object.assign((dim) => BUILDERS[name].make(dim), { size });

  const combine = (upper) => (dim, first, second) => {
    if (first.size === undefined && second.size === undefined)
      throw Error("give one part a size, as in upper(dense(2),diagonal)");
    const rows = first.size !== undefined ? Math.min(dim, first.size) : dim - Math.min(dim, second.size);
    if (rows === 0) return second(dim);
    if (rows === dim) return first(dim);
    return normal(first(rows), second(dim - rows), upper);
  };

  // Dense rows above or below something are the form with fewer operations, as in the library.
  function normal(first, second, upper) {
    const isDense = (s) => /^dense\(\d+\)$/.test(s.text);
    if (upper && isDense(first)) {
      if (second.isHierarchical && !second.first) return hierarchical(first.dim, second.middle, second.last);
      return hierarchical(first.dim, second, 0);
    }
    if (!upper && isDense(second)) return hierarchical(0, first, second.dim);
    return beside(first, second, upper);
  }

  const upper = combine(true), lower = combine(false);

  // own: the numbers that a name is followed by, with their defaults; parts: how many structures it takes.
  const BUILDERS = {
    dense: { own: {}, make: dense },
    diagonal: { own: {}, make: diagonal },
    block_diagonal: { own: { block: 32 }, make: blockDiagonal },
    tril: { own: {}, make: (dim) => triangular(dim, false) },
    triu: { own: {}, make: (dim) => triangular(dim, true) },
    tril_toeplitz: { own: {}, make: (dim) => toeplitz(dim, false) },
    triu_toeplitz: { own: {}, make: (dim) => toeplitz(dim, true) },
    rank_triu: { own: { rank: 1 }, make: (dim, k) => upper(dim, sized("dense", k), diagonal) },
    rank_tril: { own: { rank: 1 }, make: (dim, k) => lower(dim, sized("dense", k), diagonal) },
    rank_triu_mirrored: { own: { rank: 1 }, make: (dim, k) => upper(dim, diagonal, sized("dense", k)) },
    rank_tril_mirrored: { own: { rank: 1 }, make: (dim, k) => lower(dim, diagonal, sized("dense", k)) },
    hierarchical: {
      own: { first: 16, last: 16 },
      make: (dim, k1, k2) =>
        upper(dim, sized("dense", k1), (rest) => lower(rest, diagonal, sized("dense", k2))),
    },
    upper: { own: {}, parts: 2, make: upper },
    lower: { own: {}, parts: 2, make: lower },
  };

  // Text such as "upper(dense(2),diagonal)" to a function of the dimension, which has a size if text says so.
  function parse(text) {
    const words = text.match(/\w+|\S/g) ?? [];
    let at = 0;
    const read = () => {
      const name = words[at++] ?? "", builder = Object.hasOwn(BUILDERS, name) ? BUILDERS[name] : null;
      if (!builder) throw Error(`“${name}” is no structure: ${Object.keys(BUILDERS).join(", ")}`);
      const given = [];
      if (words[at] === "(") {
        do {
          at++; // the bracket or comma
          given.push(/^\d+$/.test(words[at] ?? "") ? Number(words[at++]) : read());
        } while (words[at] === ",");
        if (words[at++] !== ")") throw Error(`a bracket of “${name}” is not closed`);
      }
      return named(name, builder, given);
    };
    const factory = read();
    if (at < words.length) throw Error(`“${words[at]}” comes after the end`);
    return factory;
  }

  function named(name, { own, parts = 0, make }, given) {
    const defaults = Object.values(own), wanted = parts || defaults.length;
    let size = given.length === wanted + 1 && typeof given[wanted] === "number" ? given.pop() : undefined;
    const kind = parts ? "function" : "number";
    if (given.length > wanted || (parts && given.length < parts) || given.some((g) => typeof g !== kind))
      throw Error(`“${name}” takes ${parts ? "two structures" : Object.keys(own).join(", ") || "no numbers"}`);
    if (given.includes(0)) throw Error(`numbers of “${name}” are at least 1`);
    if (parts && given.every((part) => part.size !== undefined)) size = given[0].size + given[1].size;
    const values = parts ? given : defaults.map((value, i) => given[i] ?? value);
    const factory = (dim) => {
      if (size !== undefined && dim > size)
        throw Error(`“${name}” has ${size} rows and cannot fill ${dim}: leave a size out`);
      return make(dim, ...values);
    };
    return Object.assign(factory, { size });
  }

  const bind = (text, dim) => parse(text)(dim);

  // --- Pictures --------------------------------------------------------------------------------------------

  // Random entries near the identity, the same for the same seed; then K Kᵀ and its inverse, row after row.
  function matrices(structure, seed = 1) {
    const { dim } = structure, draw = normalNumbers(seed), spread = 1 / Math.sqrt(dim);
    const k = new Float64Array(dim * dim);
    structure.fill((i, j, value) => { k[i * dim + j] = value; }, () => spread * draw());
    const square = new Float64Array(dim * dim);
    block(dim, dim, (i, j) => {
      for (let l = 0; l < dim; l++) square[i * dim + j] += k[i * dim + l] * k[j * dim + l];
    });
    return { k, square, inverse: inverse(square, dim) };
  }

  function normalNumbers(seed) {
    let state = seed >>> 0;
    const uniform = () => { // mulberry32: 32 bits of state are enough for pictures
      state = (state + 0x6d2b79f5) >>> 0;
      let x = Math.imul(state ^ (state >>> 15), state | 1);
      x ^= x + Math.imul(x ^ (x >>> 7), x | 61);
      return (((x ^ (x >>> 14)) >>> 0) + 0.5) / 2 ** 32;
    };
    return () => Math.sqrt(-2 * Math.log(uniform())) * Math.cos(2 * Math.PI * uniform());
  }

  // Gauss and Jordan, with the largest pivot of each column.
  function inverse(matrix, dim) {
    const rows = Array.from({ length: dim }, (_, i) =>
      Float64Array.from({ length: 2 * dim }, (_, j) => (j < dim ? matrix[i * dim + j] : j - dim === i)));
    for (let c = 0; c < dim; c++) {
      let best = c;
      for (let i = c + 1; i < dim; i++) if (Math.abs(rows[i][c]) > Math.abs(rows[best][c])) best = i;
      [rows[c], rows[best]] = [rows[best], rows[c]];
      const pivot = rows[c][c];
      rows[c].forEach((value, j) => { rows[c][j] = value / pivot; });
      for (let i = 0; i < dim; i++) {
        const factor = rows[i][c];
        if (i === c || factor === 0) continue;
        for (let j = 0; j < 2 * dim; j++) rows[i][j] -= factor * rows[c][j];
      }
    }
    return Float64Array.from({ length: dim * dim }, (_, at) => rows[Math.floor(at / dim)][dim + (at % dim)]);
  }

  // Round-off is no entry.
  function isZero(matrix) {
    const largest = matrix.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
    return (at) => Math.abs(matrix[at]) <= 1e-9 * largest;
  }

  // --- Costs -----------------------------------------------------------------------------------------------

  // Entries and operations for a weight of so many outputs and inputs, and so many rows in a batch: as
  // ingot.plan tells them for a layer without a bias, with cache_products=False.
  function costs(text, { inputs, outputs, rows, every }) {
    const k = bind(text, inputs), c = bind(text, outputs), weights = inputs * outputs;
    const gradient = applied(k, outputs) + applied(c, inputs);
    const update = 2 * (k.product + c.product);
    const statistics = statistic(k, rows) + statistic(c, rows);
    return {
      k: k.numel, c: c.numel, weights, gradient, update, statistics,
      state: weights + k.numel + c.numel, adamw: 2 * weights,
      perStep: gradient + (update + statistics) / every,
      passes: 6 * rows * weights, // forward, and back to inputs and weights
    };
  }

  function applied(structure, columns) {
    const { square, dim } = structure;
    if (square !== null && square / dim < columns) return structure.product + 2 * square * columns;
    return 2 * structure.flops(columns);
  }

  const statistic = (structure, rows) =>
    structure.gramFirst(rows) ? structure.flops(rows) + 2 * structure.product : 2 * structure.flops(rows);

  return { BUILDERS, bind, costs, isZero, matrices };
})();
