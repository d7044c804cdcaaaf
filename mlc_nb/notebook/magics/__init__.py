"""The magics that ``%load_ext mlc_nb`` adds, by what they are about; ``%mlc?`` lists them."""
