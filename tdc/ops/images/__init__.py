"""Operations on positions that have neighbours: convolution, pooling, resampling."""
