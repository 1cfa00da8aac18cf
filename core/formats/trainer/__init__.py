"""Training state that transformers' Trainer and accelerate save in files next to the weights.

Start at ``state``. ``optimizer`` gives the numbered parameters of an optimizer their names.
``torch_models`` reads second models in torch files.
"""
