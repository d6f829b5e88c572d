// What each quantity means, in one sentence for somebody who has never heard of it.

import { isImage } from "./pictures.js";

const TEXTS = {
  map: "Each picture is one component: a typical kind of row that the model has found in its data. Neighbours look alike.",
  profileMap: "Each picture is one component, a typical kind of row: bars or lines above the middle are features above average, those below it are below average. Neighbours look alike.",
  weight: "Weight: the share of all data that belongs to this component.",
  likelihood: "Likelihood: how well the model explains the rows of this component on average; higher is better explained.",
  outliers: "Outlier share: of the rows that belong to this component, how many the model finds hardly likely.",
  centroid: "Centroid: the average row of this component.",
  precision: "Precision: how exactly each value is determined; high (yellow) means it hardly varies from row to row.",
  precisionProfile: "Precision: how exactly each value is determined; a high bar or line means it hardly varies from row to row.",
  deviation: "Spread: by how much values vary around the centroid, noise included.",
  features: "Each feature of the row that the sliders make: its value in its own units, and by how much it usually varies in this component.",
  loadings: "Loadings: what one step along a factor adds (red) and takes away (blue).",
  loadingsProfile: "Loadings: what one step along a factor adds (above the middle) and takes away (below it).",
  factors: "A factor is a direction along which rows of this component differ from each other: move a slider and see what changes. ±1 is usual, ±3 is rare.",
  explained: "How much of the differences between rows of this component each factor accounts for; the rest is noise, which follows no pattern.",
  samples: "Rows that the model invents: a random position on every factor, without and with the noise of single values.",
  nearest: "Rows of your data that belong to this component, those most like its centroid first; below each, its log-likelihood.",
  histogram: "How likely the model finds each row of your data: rows far to the left are unusual. The height of a bar is the number of rows.",
  share: "How many of the least likely rows are to be called outliers.",
  most: "The rows that the model finds most likely: the most ordinary ones.",
  least: "The rows that the model finds least likely: unusual, wrong or new.",
  score: "how likely the model finds this row, as a logarithm; only comparisons with other rows have a meaning.",
  incomplete: "Rows with values missing are scored by the values they have: the fewer they have, the higher they score.",
  shares: "Responsibilities: with which probability the row belongs to each component.",
  code: "Latent code: where the row lies along the factors of its component; ±1 is usual, beyond ±3 is rare. The second number says how exactly this is known.",
  rebuilt: "Reconstruction: the row as its component and latent code alone describe it.",
  reasons: "For every value: what the model would expect, knowing all the other values of the row, and how many standard deviations away the value is: up to ±2 is usual, beyond ±3 is rare.",
  reasonsImage: "Where the row differs from what the model expects, knowing all the other pixels: red is brighter than expected, blue is darker.",
  filled: "Filled in: what the model expects in the places that are missing, knowing all the others.",
  training: "What training has learned so far, at each moment when it was saved.",
  curve: "Log-likelihood of the rows during training: it rises while the model learns.",
  components: "Components come and go during training: how many there are, and how many carry a noticeable share of the data.",
};

// The texts by name; where rows are images, they speak of images.
export const WORDS = new Proxy(TEXTS, {
  get: (texts, name) => (isImage() ? texts[name].replace(/\b([Rr])ow(s?)\b/g,
    (_, r, s) => `${r === "R" ? "I" : "i"}mage${s}`).replace(/\ba (?=image)/g, "an ") : texts[name]),
});

// "Row 7" or "Image 7".
export function titled(number) {
  return `${isImage() ? "Image" : "Row"} ${number}`;
}

export function noun(plural = false) {
  return (isImage() ? "image" : "row") + (plural ? "s" : "");
}
