"""Colours that everybody tells apart, on light and on dark ground."""

from __future__ import annotations

#: Okabe and Ito (2008), "Color universal design": blue, orange, green, vermilion, purple, sky blue.
BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
LINES = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION)
#: What is NaN or infinite: a colour that the scale does not have.
LOUD = "#FF00C8"
#: The scale of heat maps, which rises in lightness for everybody.
SCALE = "Viridis"
#: The scale around a median: the middle is grey, so that it is told from white, which is nothing.
AROUND = ((0.0, BLUE), (0.5, "#C9CDD3"), (1.0, VERMILION))
GREY = "#8A8F98"
