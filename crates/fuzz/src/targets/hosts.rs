//! What comes over a network from another host: a stranger's handshake, then messages whose sender has shown that it
//! knows the secret.

/// Words of the launchers' messages.
pub(crate) const HOST_WORDS: &[&str] = &[
    "\"Beat\"",
    "\"Ended\"",
    "{\"Join\":",
    "{\"Failed\":",
    "{\"Welcome\":",
    "\"facts\":[",
    "\"node_rank\":18446744073709551615",
    "\"limit_ms\":0",
    "\"Scheduler\":",
    "\"Signal\":-2147483648",
    "\\u001b[2J",
    "LOCKSTEP",
    "null",
    "[[[[[[[[",
    "-1",
    "1e999",
];

/// The first byte says what the rest is: bytes of a stranger, of a known sender, a launcher's message, addresses of ranks.
pub(crate) fn hosts(input: &[u8]) {
    let Some((kind, rest)) = input.split_first() else { return };
    match kind % 4 {
        0 => lockstep_comm::fuzzing::handshake(rest),
        1 => lockstep_comm::fuzzing::frames(rest, lockstep_launch::fuzzing::read_host_message),
        2 => lockstep_launch::fuzzing::read_host_message(rest),
        _ => lockstep_comm::fuzzing::addresses(rest),
    }
}
