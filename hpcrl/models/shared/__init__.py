"""What families of models share: dense layers, experts, latent attention, hybrids of two kinds of attention, and layers
that predict further tokens.  No family is registered here."""
