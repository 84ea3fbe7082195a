//! Words that a period abbreviates: whether the sentence goes on after the period, and how those that stand before a
//! number are written out.
//!
//! The package knows titles and initials only, and has words for some of the abbreviations. Where a period may end the
//! sentence or not, what follows decides. A number belongs to an abbreviation ("No. 5 people came."). After other
//! abbreviations a sentence ends before a word that begins many sentences ("in the U.S. The weather"), and not before
//! another ("the U.S. Senate").

use regex::Regex;

use crate::Error;
use crate::characters::{WORD, last_chars};
use crate::tables::{MONTHS, Tables, one_of};

/// Abbreviations with their words, which replace them before a number.
const BEFORE_NUMBER: &[(&str, &str)] = &[
    ("no No NO nr Nr", "number"),
    ("nos Nos NOS", "numbers"),
    ("alt Alt", "altitude"),
    ("approx Approx", "approximately"),
    ("avg Avg", "average"),
    ("c ca", "circa"),
    ("diam", "diameter"),
    ("est Est", "estimated"),
    ("ext Ext", "extension"),
    ("ht Ht", "height"),
    ("lat Lat", "latitude"),
    ("max Max", "maximum"),
    ("min Min", "minimum"),
    ("pop Pop", "population"),
    ("sec", "section"),
    ("secs", "sections"),
    ("tel Tel", "telephone"),
    ("Temp", "temperature"),
    ("wt Wt", "weight"),
];
/// As [`BEFORE_NUMBER`], for what may also be numbered by a letter or a word: "Apt. B2", "Vol. I", "Vol. One".
const BEFORE_LABEL: &[(&str, &str)] = &[
    ("App", "appendix"),
    ("apt Apt APT", "apartment"),
    ("apts Apts", "apartments"),
    ("Art", "article"),
    ("arts Arts", "articles"),
    ("bk Bk", "book"),
    ("bldg Bldg", "building"),
    ("ch chap Ch Chap CH", "chapter"),
    ("chs chaps Chs Chaps", "chapters"),
    ("col Col", "column"),
    ("Cor", "Corinthians"),
    ("cols Cols", "columns"),
    ("Deut", "Deuteronomy"),
    ("ep Ep", "episode"),
    ("eps Eps", "episodes"),
    ("eq eqn Eq Eqn", "equation"),
    ("eqs eqns Eqs Eqns", "equations"),
    ("Ex", "ex"),
    ("Exod", "Exodus"),
    ("fig Fig FIG", "figure"),
    ("figs Figs FIGS", "figures"),
    ("fl flr Fl Flr", "floor"),
    ("Isa", "Isaiah"),
    ("iss Iss", "issue"),
    ("lvl Lvl", "level"),
    ("op Op", "opus"),
    ("p pg Pg", "page"),
    ("pp pgs Pp Pgs", "pages"),
    ("par para Par Para", "paragraph"),
    ("pars paras Pars Paras", "paragraphs"),
    ("Ps", "Psalm"),
    ("pt Pt", "part"),
    ("ref Ref", "reference"),
    ("refs Refs", "references"),
    ("rm Rm", "room"),
    ("rms Rms", "rooms"),
    ("Rom", "Romans"),
    ("rte Rte", "route"),
    ("sect Sec Sect", "section"),
    ("sects Secs Sects", "sections"),
    ("ste Ste STE", "suite"),
    ("suppl Suppl", "supplement"),
    ("Tab tbl Tbl", "table"),
    ("ver Ver", "version"),
    ("vol Vol VOL", "volume"),
    ("vols Vols VOLS", "volumes"),
];
/// Abbreviations with the words that replace them before a year.
const BEFORE_YEAR: &[(&str, &str)] = &[("b", "born"), ("d", "died")];
/// Titles that `normalize.json` lacks, with the words that replace them before a name.
const TITLES: &[(&str, &str)] = &[
    ("Amb", "ambassador"),
    ("Assoc", "associate"),
    ("Asst", "assistant"),
    ("Brig", "brigadier"),
    ("Cdr", "commander"),
    ("Det", "detective"),
    ("Drs", "doctors"),
    ("Gens", "generals"),
    ("Insp", "inspector"),
    ("Lieut", "lieutenant"),
    ("Profs", "professors"),
    ("Pvt", "private"),
    ("Reps", "representatives"),
    ("Sens", "senators"),
];
/// Abbreviations that are never the last word of a sentence, as the titles of `normalize.json`.
const NEVER_LAST: &str = "Messrs Mlle Mme a.k.a approx ca cf Cf e.g E.g eg Eg \
    i.e I.e ie Ie n.b N.B Rs v viz Viz vs Vs";
/// Abbreviations that end a sentence before one of the [`FIRST_WORDS`]. Some titles are among them, because they are
/// also streets and units.
const BEFORE_NAME: &str = "Ala Ariz Calif Colo Conn Fla Ill Kans Mich Minn Nebr Nev Okla Penn Tenn Tex Wis Wyo \
    Assn Ave Blvd Bldg Bros Co Corp Ct Dept dept Esq Ft Govt Hwy Inc Jr Ln Ltd Mfg Mt Pkwy Pl Rd Sq Sr St Ste Univ \
    al ed eds";
const SHORT_MONTHS: &str = "Jan Feb Mar Apr Jun Jul Aug Sep Sept Oct Nov Dec";
const DAYS: &str = "Mon Tue Tues Wed Thu Thur Thurs Fri Sat Sun";
/// What names the zone or the day of an hour.
const ZONES: &str = "UTC GMT BST CET CEST EET EEST MSK IST JST KST AEST AEDT NZST ET EST EDT CT CST CDT MT MST MDT PT \
    PST PDT AKST HST Eastern Central Mountain Pacific Christmas Easter Thanksgiving";
/// Words that begin many sentences, and no names.
const FIRST_WORDS: &str = "About After All Also Although Among An And Another Any Are As At Because Before Between \
    Both But By Can Could Despite Did Do Does During Each Even Every Everybody Everyone Everything Finally For From \
    Furthermore Had Has Have He Her Here His How However If In Instead Is It Its Later Let Many Maybe Meanwhile \
    Moreover Most Must My Never Nevertheless Nobody Nor Not Nothing Now On Once Only Or Our Otherwise Perhaps \
    Please She Should Since So Some Someone Something Soon That The Their Then There Therefore These They This Those \
    Though Thus To Today Tomorrow Under Unless Until Was We Were What When Where Whether Which While Who Whose Why \
    With Within Without Would Yes Yesterday Yet You Your";
/// A number with what may precede it, such as "#" and "$".
const NUMBER: &str = r"[[\p{P}\p{S}]--[.!?…,;]]{0,3}\p{N}";
/// A Roman numeral of several letters, or "V" or "X".
const ROMAN: &str = "[IVX][IVXLC]+|L[IVX]+|[VX]";
const NUMERALS: &str = "One|Two|Three|Four|Five|Six|Seven|Eight|Nine|Ten";
const DASH: &str = "[-–—&]";

/// Each form of the abbreviations with its word.
fn forms(words: &'static [(&str, &str)]) -> impl Iterator<Item = (&'static str, &'static str)> {
    words.iter().flat_map(|(forms, word)| forms.split(' ').map(|form| (form, *word)))
}

/// The word that replaces an abbreviation, capitalized as the abbreviation is.
pub fn word(abbreviation: &str) -> Option<String> {
    let all = [BEFORE_NUMBER, BEFORE_LABEL, BEFORE_YEAR, TITLES];
    let (_, word) = all.into_iter().flat_map(forms).find(|(form, _)| *form == abbreviation)?;
    let (first, rest) = word.split_at(1);
    let is_capital = abbreviation.starts_with(|c: char| c.is_ascii_uppercase());
    Some(if is_capital { first.to_ascii_uppercase() + rest } else { word.to_owned() })
}

/// Patterns of the abbreviations that words replace, each with a pattern of what follows: a Roman numeral in its first
/// group, or something else in its last one. The first pattern that matches applies.
pub fn replaced() -> [(String, String); 6] {
    let all = |words: &[&'static [(&str, &str)]]| -> Vec<&str> {
        words.iter().flat_map(|words| forms(words)).map(|(form, _)| form).collect()
    };
    let (capitals, smalls): (Vec<&str>, Vec<&str>) =
        all(&[BEFORE_LABEL]).into_iter().partition(|form| form.starts_with(|c: char| c.is_ascii_uppercase()));
    let end = format!("(?:$|[^{WORD}'’])");
    let small_numerals = NUMERALS.to_lowercase();
    [
        (one_of(all(&[TITLES])), r"()(\p{Lu})".to_owned()),
        (one_of(all(&[BEFORE_YEAR])), r"()((?:ca?\. ?)?[12]\d{3})".to_owned()),
        // Without the word "no", unless "of" follows.
        (one_of(["no", "nos", "No", "Nos"]), format!("()(of{end})")),
        // Without "I" and "A", which may be the first words of a sentence.
        (
            one_of(all(&[BEFORE_NUMBER, BEFORE_LABEL])),
            format!(r"(?:({ROMAN})({end})|({NUMBER}|[B-HJ-Z][A-Z]?[.\-]?\d|A\d|(?:{small_numerals}){end}))"),
        ),
        (one_of(smalls), format!(r"(?:(I)([,;:.)\]]|$)|([B-HJ-Z]{end}))")),
        (one_of(capitals), format!(r"(?:(I)({end})|([A-Z]{end}|(?:{NUMERALS}){end}))")),
    ]
}

/// Decides after which abbreviations a sentence goes on.
pub struct Abbreviations {
    /// Abbreviations with what follows them inside a sentence.
    inside: Regex,
    /// Other abbreviations: the sentence goes on, unless the next word begins many sentences.
    before_name: Regex,
    first_word: Regex,
    /// "a.m." and "p.m.": the sentence ends, unless the hour belongs to a noun: "a 9 a.m. Zoom call".
    hour: Regex,
    before_hour_of_noun: Regex,
}

impl Abbreviations {
    pub fn new(tables: &Tables) -> Result<Self, Error> {
        let any = |words: &str| words.split_whitespace().map(regex::escape).collect::<Vec<_>>().join("|");
        let names: Vec<&str> = BEFORE_NAME.split_whitespace().collect();
        let titles = one_of(tables.titles.keys().filter(|title| !names.contains(&title.as_str())));
        let units = one_of(tables.units.keys());
        let (days, months) = (any(DAYS), any(SHORT_MONTHS));
        let end = format!("(?:$|[^{WORD}])");
        let space = r#"["”’)\]]*\s+"#;
        let full_days = "(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)days?";
        // "May" may be the first word of a sentence.
        let full_months = one_of(MONTHS.into_iter().filter(|month| *month != "May"));
        let date = format!(r"(?:(?:{days}|{full_days}|{months}|{full_months}){end}|May \d)");
        let day_first = format!(r"\d{{1,2}}(?:/\d|(?:st|nd|rd|th)? (?:of )?(?:{months}))");
        let zone = format!(r"(?:{}|New Year){end}|(?:[A-Z]\S{{0,20}} ){{1,3}}[Tt]ime{end}", any(ZONES));
        let hour = r"[\d:.]{0,8}(?:[ap]\.m|[AP]\.M)\.";
        let mut inside = vec![
            format!(r"(?:{titles}|{})\.{space}", any(NEVER_LAST)),
            format!(r"(?:{days}|{months})\.{space}(?:{NUMBER}|{DASH}|{date})"),
            format!(r"{hour}{space}(?:\(?(?:{date}|{zone})|{day_first}|{DASH})"),
            format!(r"etc\.{space}(?:{NUMBER}|{DASH}|[\p{{P}}\p{{S}}]{{1,3}}\p{{Ll}})"),
            format!(r"[\d.,]{{0,8}}(?:{units})\.{space}\d{{1,6}}(?:\.\d{{1,3}})? ?(?:{units}|in){end}"),
        ];
        for (forms, follows) in replaced() {
            inside.push(format!(r"(?:{forms})\.[)\]]*\s+{follows}"));
        }
        let initials = r"\p{Lu}|\p{Lu}\p{Ll}{0,3}(?:\.-?\p{Lu}\p{Ll}{0,3}){1,6}|\p{Ll}(?:\.\p{Ll}){1,6}";
        let any_first = any(FIRST_WORDS);
        let determiners = "an?|the|this|that|our|my|his|her|their|your|every|each|next";
        Ok(Self {
            inside: Regex::new(&format!("^(?:{})", inside.join("|")))?,
            before_name: Regex::new(&format!(r"^(?:{}|{initials})\.{space}", any(BEFORE_NAME)))?,
            // "A.", "I." and "No." are abbreviations.
            first_word: Regex::new(&format!(
                r"^\p{{P}}{{0,3}}(?:(?:{any_first})(?:$|[^{WORD}\-&])|(?:A|I|No)(?:$|[^{WORD}.\-&]))"
            ))?,
            hour: Regex::new(&format!("^{hour}"))?,
            before_hour_of_noun: Regex::new(&format!(r"(?:^|\s)(?i:{determiners}) (?:[\d:]{{1,5}} )?$"))?,
        })
    }

    /// Whether the sentence goes on after the period of a word. `before` precedes the word, `text` begins with it, and
    /// `next` is what follows the white space after the period.
    pub fn goes_on(&self, before: &str, text: &str, next: &str) -> bool {
        let ends_with_hour =
            || self.hour.is_match(text) && !self.before_hour_of_noun.is_match(last_chars(before, 16));
        self.inside.is_match(text)
            || self.before_name.is_match(text) && !self.first_word.is_match(next) && !ends_with_hour()
    }
}
