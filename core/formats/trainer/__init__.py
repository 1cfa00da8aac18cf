"""Training state that transformers' Trainer and accelerate save in files next to the weights.

Start at ``state``. ``files`` knows the names of the files, ``optimizer`` gives the numbered
parameters of an optimizer their names, in an order that ``parameter_order`` finds. ``above`` reads
the same files above a directory of DeepSpeed, ``torch_models`` second models in torch files.
"""
