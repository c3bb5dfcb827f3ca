"""The commands of ``gradmon``, one file each; ``torch_gradmon/cli.py`` lists them."""
