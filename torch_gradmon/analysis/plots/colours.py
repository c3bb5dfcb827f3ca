"""Colours that are distinct for the colour-blind, on light and on dark pages."""

from __future__ import annotations

#: Okabe and Ito (2008), "Color universal design": blue, orange, green, vermilion, purple, sky blue.
BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
#: NaN or infinite: a colour that no scale has.
NONFINITE = "#FF00C8"
#: Exactly 0, or no gradient at all: darker than any scale where that is warm.
ZERO = "#6B3F12"
#: The scale of heat maps, whose lightness rises monotonically.
SCALE = "Viridis"
#: The scale around a median. Its middle is grey, to differ from white, which means no value.
DIVERGING = ((0.0, BLUE), (0.5, "#C9CDD3"), (1.0, VERMILION))
GREY = "#8A8F98"
