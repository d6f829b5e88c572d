// The sentences that explain each quantity to a newcomer.

import { isImage } from "./pictures.js";

const ROW_TEXTS = {
  map: "Each picture is one component: a typical kind of row in the data. Neighbours look alike.",
  profileMap: "Each picture is one component: a typical kind of row. Bars or lines above the middle are features above average; below the middle they are below average. Neighbours look alike.",
  weight: "Weight: the share of all data that belongs to this component.",
  likelihood: "Likelihood: how well the model explains the rows of this component on average. Higher is better.",
  outliers: "Outlier share: the share of this component's rows that are outliers.",
  centroid: "Centroid: the average row of this component.",
  precision: "Precision: how exactly each value is determined. High (yellow) means that it hardly varies from row to row.",
  precisionBars: "Precision: how exactly each value is determined. A long bar means that it hardly varies from row to row.",
  precisionLine: "Precision: how exactly each value is determined. A high line means that it hardly varies from row to row.",
  deviation: "Spread: how much each value varies around the centroid, noise included.",
  features: "The row that the sliders make: each feature in its own units, and how much it usually varies in this component.",
  loadings: "Loadings: what one step along a factor adds (red) or takes away (blue).",
  loadingsBars: "Loadings: what one step along a factor adds (red) or takes away (blue).",
  loadingsLine: "Loadings: what one step along a factor adds (above the middle) or takes away (below the middle).",
  readout: "Point at a column, or use the arrow keys, to see its name and value.",
  factors: "A factor is a direction in which rows of this component differ. Move a slider and see what changes: ±1 is usual, ±3 is rare.",
  explained: "How much of the variation within this component each factor explains. The rest is noise, which follows no pattern.",
  samples: "Rows drawn from the model: a random position on every factor, without and with noise.",
  nearest: "Rows of your data that belong to this component, nearest to its centroid first, each with its log-likelihood.",
  histogram: "How likely each row of your data is under the model. Rows far to the left are unusual. The height of a bar is the number of rows.",
  share: "The share of the least likely rows that count as outliers.",
  most: "The rows that are most likely under the model: the most ordinary ones.",
  least: "The rows that are least likely under the model: unusual, wrong or new.",
  leftOut: "The model was trained on this data, so each row is scored as if it had been left out.",
  score: "the logarithm of how likely this row is under the model. It has a meaning only in comparison with other rows.",
  incomplete: "Rows with missing values are scored by the values they have: the fewer values, the higher the score.",
  shares: "Responsibilities: the probability that the row belongs to each component.",
  code: "Latent code: where the row lies along the factors of its component. ±1 is usual, beyond ±3 is rare. The second number is the uncertainty.",
  reconstruction: "Reconstruction: the row as described by its component and latent code alone.",
  reasons: "The value that the model expects for each feature, given all the other values of the row, and how many standard deviations the actual value is away from it. Up to ±2 is usual, beyond ±3 is rare.",
  reasonsImage: "Where the row differs from what the model expects, given all the other pixels: red is brighter than expected, blue is darker.",
  imputed: "Filled in: what the model expects for the missing values, given all the others.",
  regions: "A component is a region of the activations. Its purity is the share of its most frequent token.",
  contexts: "The tokens of the highest density in this component, in their contexts. Click one to read the text.",
  ends: "The tokens at both ends of each factor: what differs between the left and the right is what the factor means here.",
  document: "Click a token to see the components that it belongs to and its latent code.",
  along: "Colour: where each token lies along this factor of the component, from blue (-3) to red (+3). The colour fades where a token belongs to other components.",
  imageSamples: "Images that the model draws from nothing. It draws any size.",
  raster: "The model draws pixel by pixel, from the top left to the bottom right, each given those before.",
  thumbnails: "The model first draws thumbnails, pixel by pixel.",
  oneSizeSamples: "Images that the model draws from nothing. They have the size of its training images.",
  wholeThumbnails: "The model first draws thumbnails, each from a mixture of whole ones.",
  finer: "The same images, twice as large: the model draws the differences within blocks of 2 × 2 pixels.",
  image: "See how surprising each pixel of an image is to the model, and let it fill what you erase.",
  oneSize: "The image must have SIZE pixels, like the training images.",
  anyImage: "The image may have any size up to LIMIT pixels.",
  surprise: "Surprise: how many bits each pixel costs, given the pixels that are known before it. Yellow pixels are hard to predict.",
  shared: "The pixels of a block share its bits.",
  erase: "Paint over a region of the image above. The model draws it again, given all the other pixels, and the page shows it with its surroundings.",
  bits: "Bits per number of a pixel, of each batch before it is learned: they fall while the model learns.",
  training: "What training has learned so far, each time the model was saved.",
  curve: "Log-likelihood of the rows during training: it rises while the model learns.",
  components: "How many components there are during training, and how many hold a noticeable share of the data.",
};

// The texts by name; where rows are images, they speak of images.
export const TEXTS = new Proxy(ROW_TEXTS, {
  get: (texts, name) => (isImage() ? texts[name].replace(/\b([Rr])ow(s?)\b/g,
    (_, r, s) => `${r === "R" ? "I" : "i"}mage${s}`).replace(/\ba (?=image)/g, "an ") : texts[name]),
});

// "Row 7", or "Image 7: cat.png" with the name that the data has for it.
export function rowTitle(number, name) {
  return `${isImage() ? "Image" : "Row"} ${number}${name ? `: ${name}` : ""}`;
}

export function rowNoun(plural = false) {
  return (isImage() ? "image" : "row") + (plural ? "s" : "");
}
