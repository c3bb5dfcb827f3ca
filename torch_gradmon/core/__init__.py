"""The words that all other rooms share: keys, metrics, records, errors."""
