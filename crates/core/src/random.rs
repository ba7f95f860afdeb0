//! The step of every stream of random numbers that must be the same on every machine: workloads, made-up weights,
//! simulated runs. (Sampling has its own: `lockstep_backend::sampler`.)

/// The next 64 bits of the stream that `state` is in: SplitMix64 (Steele, Lea, Flood 2014).
pub fn splitmix64(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stream_of_zero_is_the_published_one() {
        let mut state = 0;
        let drawn = [(); 3].map(|()| splitmix64(&mut state));
        assert_eq!(drawn, [0xe220_a839_7b1d_cdaf, 0x6e78_9e6a_a1b9_65f4, 0x06c4_5d18_8009_454f]);
    }
}
