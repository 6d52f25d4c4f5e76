//! The vocabulary of made-up answers: short words with a space in front, each of which is one token wherever it stands.

/// A power of two of them, so that a word is picked by masking.
const WORDS: [&str; 128] = [
    " able", " about", " after", " again", " air", " all", " also", " and", " any", " area", " arm", " art",
    " ask", " away", " back", " ball", " bank", " base", " bed", " best", " big", " bird", " blue", " boat",
    " body", " book", " both", " box", " bring", " build", " call", " car", " care", " case", " cell",
    " child", " city", " class", " clear", " close", " cold", " color", " come", " cook", " cost", " cut",
    " day", " deal", " deep", " door", " draw", " dream", " dry", " each", " early", " earth", " east",
    " eat", " edge", " end", " even", " eye", " face", " fact", " fall", " far", " farm", " fast", " few",
    " field", " fill", " find", " fine", " fire", " first", " fish", " five", " flow", " food", " form",
    " free", " game", " garden", " give", " glass", " gold", " good", " grass", " green", " ground",
    " group", " half", " hand", " hear", " heat", " hill", " home", " horse", " hour", " house", " ice",
    " idea", " iron", " job", " keep", " key", " kind", " king", " lake", " land", " large", " late",
    " leaf", " learn", " left", " letter", " life", " light", " line", " list", " long", " map", " mark",
    " moon", " music", " name", " near", " night",
];

/// Word number `index` of the answer that `seed` stands for.
pub(super) fn word(seed: u64, index: u32) -> &'static str {
    let mixed =
        (seed ^ u64::from(index).wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    WORDS[(mixed >> 57) as usize]
}

/// All words, for those who must know their tokens.
pub(super) fn all() -> &'static [&'static str] {
    &WORDS
}
