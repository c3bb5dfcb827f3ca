"""An accelerator that exists in Python only, on which tests count launches and find missing waits."""
