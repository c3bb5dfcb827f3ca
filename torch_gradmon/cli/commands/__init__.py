"""The commands of ``gradmon``, one file each; ``torch_gradmon/cli/main.py`` lists them."""
