// The same request with and without speculation, again and again, in turns: one pair alone would be noise.

import { answerOf } from "/page/api.js";
import { whole } from "/page/run.js";

export const PAIRS = 5;

export function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

async function time(request, key, signal) {
  const { choices, metrics } = await answerOf(request, key, signal);
  return { text: choices[0].text ?? whole(choices[0].message), speed: metrics.tokens_per_second };
}

// Speeds in tokens/s, pair by pair, and how many of all the texts, `shown` among them, differ from it. Neither traced
// nor with probabilities: what is timed does nothing but decode. Every other pair begins with plain decoding.
export async function compare(asked, shown, key, signal, onPair) {
  const { logprobs, top_logprobs, ...bare } = asked;
  const { trace, ...speculative } = asked.speculative;
  const found = { on: [], off: [], texts: 1, different: 0 };
  for (let pair = 0; pair < PAIRS; pair++) {
    onPair(found, pair);
    for (const key_ of pair % 2 ? ["off", "on"] : ["on", "off"]) {
      const wish = key_ === "on" ? speculative : { enabled: false };
      const { text, speed } = await time({ ...bare, speculative: wish }, key, signal);
      if (speed) found[key_].push(speed);
      found.texts += 1;
      found.different += text === shown ? 0 : 1;
    }
  }
  return found;
}

// What a comparison says, what matters first. `promised`: whether the rule in use keeps the text.
export function words(found, promised) {
  const reason = promised ? "!" : ": this rule keeps the distribution, not the text.";
  const texts = found.different
    ? `${found.different} of ${found.texts} answers differ${reason}`
    : `All ${found.texts} answers are identical.`;
  if (found.on.length < PAIRS || found.off.length < PAIRS) return ["Too short to time.", texts];
  const ratios = found.on.map((speed, i) => speed / found.off[i]);
  const [least, most] = [Math.min(...ratios), Math.max(...ratios)];
  const middle = `${median(ratios).toFixed(2)}×`;
  const spread = `median of ${PAIRS} interleaved pairs; ${least.toFixed(2)} to ${most.toFixed(2)}`;
  return least <= 1 && most >= 1
    ? ["No clear difference in speed", `(${middle} plain decoding's, ${spread}). ${texts}`]
    : [`${middle} the speed of plain decoding`, `(${spread}). ${texts}`];
}
