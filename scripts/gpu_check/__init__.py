"""`make gpu-check`: what sconce promises of a GPU, each promise with PASS or FAIL, and its speed beside
PyTorch's, on the same weights and texts in one run. Needs Python 3.9 and PyTorch; no broker, no network.

| file | decides |
|---|---|
| `main` | what is checked and measured, in which order, and when time is up |
| `arguments` | what is asked |
| `findings` | what counts as passed, failed and not measured |
| `shapes` | which networks, and what a token costs in them |
| `weights`, `vocabulary` | the model's files, from a seed |
| `texts` | what is embedded |
| `sconce` | how the program is run |
| `starting` | what a launcher writes to its worker |
| `card` | what the driver says of the card, and how fast it multiplies |
| `discovery`, `isolation`, `memory`, `answers` | the promises |
| `plain`, `wordpiece` | the network and its tokenizer in Python alone |
| `pytorch` | the same in PyTorch, in transformers and in sentence-transformers |
| `speed` | what is timed against what |
| `page` | the table, and where it is written |
"""
