// What the commands of TeX mean: characters, by the kind of element that holds them.

const pairs = text => text.trim().split(/\s+/).map(pair => pair.split(":"));

export const LETTERS = new Map(pairs(`alpha:α beta:β gamma:γ delta:δ epsilon:ϵ varepsilon:ε zeta:ζ eta:η theta:θ vartheta:ϑ
  iota:ι kappa:κ lambda:λ mu:μ nu:ν xi:ξ omicron:ο pi:π varpi:ϖ rho:ρ varrho:ϱ sigma:σ varsigma:ς tau:τ upsilon:υ phi:ϕ
  varphi:φ chi:χ psi:ψ omega:ω Gamma:Γ Delta:Δ Theta:Θ Lambda:Λ Xi:Ξ Pi:Π Sigma:Σ Upsilon:Υ Phi:Φ Psi:Ψ Omega:Ω ell:ℓ hbar:ℏ
  partial:∂ nabla:∇ infty:∞ emptyset:∅ varnothing:∅ aleph:ℵ Re:ℜ Im:ℑ imath:ı jmath:ȷ top:⊤ bot:⊥ angle:∠ degree:° dagger:†
  dots:… ldots:… dotsc:… cdots:⋯ dotsb:⋯ vdots:⋮ ddots:⋱ prime:′ S:§ checkmark:✓ square:□ blacksquare:■ triangle:△ star:⋆`));

export const OPERATORS = new Map(pairs(`times:× cdot:⋅ div:÷ pm:± mp:∓ ast:∗ circ:∘ bullet:∙ oplus:⊕ otimes:⊗ odot:⊙ ominus:⊖
  cup:∪ cap:∩ setminus:∖ wedge:∧ land:∧ vee:∨ lor:∨ neg:¬ lnot:¬ le:≤ leq:≤ leqslant:⩽ ge:≥ geq:≥ geqslant:⩾ ne:≠ neq:≠ ll:≪
  gg:≫ equiv:≡ approx:≈ sim:∼ simeq:≃ cong:≅ propto:∝ in:∈ notin:∉ ni:∋ subset:⊂ subseteq:⊆ supset:⊃ supseteq:⊇ forall:∀
  exists:∃ nexists:∄ to:→ rightarrow:→ leftarrow:← gets:← leftrightarrow:↔ Rightarrow:⇒ Leftarrow:⇐ Leftrightarrow:⇔ implies:⟹
  iff:⟺ Longrightarrow:⟹ Longleftarrow:⟸ Longleftrightarrow:⟺ longleftarrow:⟵ longleftrightarrow:⟷ nearrow:↗
  searrow:↘ impliedby:⟸ triangleq:≜ subsetneq:⊊ supsetneq:⊋ nsubseteq:⊈ nmid:∤ smallsetminus:∖ amalg:⨿ diamond:⋄ lhd:⊲ rhd:⊳ mapsto:↦ longrightarrow:⟶ hookrightarrow:↪ uparrow:↑ downarrow:↓ perp:⊥ parallel:∥ mid:∣ models:⊨ vdash:⊢ therefore:∴
  because:∵ colon:: prec:≺ succ:≻ lesssim:≲ gtrsim:≳ asymp:≍ doteq:≐ coloneqq:≔ rightleftharpoons:⇌ langle:⟨ rangle:⟩
  lfloor:⌊ rfloor:⌋ lceil:⌈ rceil:⌉ lvert:| rvert:| vert:| lVert:‖ rVert:‖ Vert:‖ backslash:\\ lbrace:{ rbrace:} lbrack:[
  rbrack:] {:{ }:} |:‖ %:% $:$ #:# &:& _:_`));
OPERATORS.set("colon", ":");

/** With limits above and below in display style, and whether they grow there. */
export const LARGE = new Map(pairs(`sum:∑ prod:∏ coprod:∐ bigcup:⋃ bigcap:⋂ bigoplus:⨁ bigotimes:⨂ bigvee:⋁ bigwedge:⋀`));
export const INTEGRALS = new Map(pairs(`int:∫ iint:∬ iiint:∭ oint:∮`));
export const LIMITS = new Set("lim limsup liminf max min sup inf argmax argmin det gcd Pr".split(" "));
export const FUNCTIONS = new Set(("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh coth log ln lg exp dim ker deg hom "
  + "arg").split(" "));

export const ACCENTS = new Map(pairs(`hat:^ widehat:^ bar:¯ overline:¯ vec:→ overrightarrow:→ tilde:~ widetilde:~ dot:˙ ddot:¨
  overbrace:⏞ check:ˇ breve:˘ mathring:˚`));
export const UNDER = new Map(pairs("underline:_ underbrace:⏟"));

export const SPACES = new Map(Object.entries({",": "0.17em", ":": "0.22em", ">": "0.22em", ";": "0.28em", "!": "-0.17em",
  " ": "0.3em", "~": "0.3em", quad: "1em", qquad: "2em", enspace: "0.5em", thinspace: "0.17em"}));

/** Letters in other styles are characters of their own: the first capital, small letter and digit of each, and exceptions. */
export const STYLES = {
  mathbf: [0x1d400, 0x1d41a, 0x1d7ce, {}], boldsymbol: [0x1d468, 0x1d482, 0x1d7ce, {}], bm: [0x1d468, 0x1d482, 0x1d7ce, {}],
  mathbb: [0x1d538, 0x1d552, 0x1d7d8, {C: "ℂ", H: "ℍ", N: "ℕ", P: "ℙ", Q: "ℚ", R: "ℝ", Z: "ℤ"}],
  mathcal: [0x1d49c, 0x1d4b6, 0, {B: "ℬ", E: "ℰ", F: "ℱ", H: "ℋ", I: "ℐ", L: "ℒ", M: "ℳ", R: "ℛ", e: "ℯ", g: "ℊ", o: "ℴ"}],
  mathscr: [0x1d49c, 0x1d4b6, 0, {B: "ℬ", E: "ℰ", F: "ℱ", H: "ℋ", I: "ℐ", L: "ℒ", M: "ℳ", R: "ℛ", e: "ℯ", g: "ℊ", o: "ℴ"}],
  mathfrak: [0x1d504, 0x1d51e, 0, {C: "ℭ", H: "ℌ", I: "ℑ", R: "ℜ", Z: "ℨ"}],
  mathsf: [0x1d5a0, 0x1d5ba, 0x1d7e2, {}], mathtt: [0x1d670, 0x1d68a, 0x1d7f6, {}],
};
