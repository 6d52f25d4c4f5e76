//! What one reading of an engine's metrics page means, beside the reading before and beside what was given to the worker from
//! here. Pure.
//!
//! The engine counts a prompt when its prefill is over; what is still pending here is taken off, so that a queue that grows
//! or shrinks does not look like somebody else's traffic.

use super::exposition::Page;
use crate::core::load::Given;
use crate::metrics::Forgot;

/// What is kept of the traffic of readings past, at each new one: about ten readings count.
const KEEP: f64 = 0.85;
/// Prompt tokens below which nothing is said of shares.
const FEW_TOKENS: f64 = 2_000.0;
/// Foreign shares up to this are errors of counting. Where answers do not tell how long prompts are, tokens are guessed from
/// bytes, and the guess may be that wrong.
const COUNTED_WELL: f64 = 0.1;
const COUNTED_BADLY: f64 = 0.4;
/// Requests by which an engine must have found something of what is believed cached.
const ENOUGH_REQUESTS: u64 = 4;
/// Readings in a row that do not move although answers came: the page has stopped.
const FROZEN: u32 = 2;
/// Pages in a row that lack engines, after which they are taken to be gone.
const LACKING: u32 = 30;
/// Processes are told apart by their start, in seconds.
const SAME_START: f64 = 1.0;

/// The readings of one worker so far.
#[derive(Clone, Debug, Default)]
pub struct Readings {
    last: Option<(Page, Given)>,
    /// Prompt tokens of late, all and those that did not come through here.
    total: f64,
    foreign: f64,
    still: u32,
    /// Pages in a row that lacked engines.
    lacking: u32,
}

/// What a reading means.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub struct Meaning {
    /// What was believed of the worker's cache is void.
    pub forget: Option<Forgot>,
    /// Requests at the worker that did not come through here.
    pub foreign_requests: f64,
    /// Of these, in its queue.
    pub foreign_waiting: f64,
    /// The share of its prompt tokens that did not come through here.
    pub foreign_share: f64,
    /// Tokens that the engine found cached since the last reading, of so many that it looked up.
    pub hits: f64,
    pub queries: f64,
    /// The page has stopped: its gauges mean nothing.
    pub frozen: bool,
    /// Engines are missing on the page: nothing on it means anything.
    pub incomplete: bool,
}

impl Readings {
    /// When the process began, in seconds since 1970.
    pub fn process_started(&self) -> Option<f64> {
        self.last?.0.started
    }

    /// Takes a page. `before` and `after` are what the worker had been given before and after its reading; `confirms`: its answers tell what was
    /// cached, so that a reset is seen there, and sooner.
    pub fn take(&mut self, page: Page, before: Given, after: Given, confirms: bool) -> Meaning {
        let mut meaning = Meaning::default();
        if self.last.is_some_and(|(last, _)| !started_anew(&last, &page) && page.lacks_engines(&last)) {
            self.lacking += 1;
            if self.lacking < LACKING {
                return Meaning { incomplete: true, ..meaning };
            }
            *self = Readings::default();
        }
        self.lacking = 0;
        if let Some((last, given)) = self.last.replace((page, after)) {
            let known = page.or(last);
            self.last = Some((known, after));
            if let Some(why) = restarted(&last, &page) {
                *self = Readings { last: Some((page, after)), ..Readings::default() };
                meaning.forget = Some(why);
                return self.add_foreign_requests(meaning, &page, before, after);
            }
            meaning.hits = grown(last.hits, page.hits);
            meaning.queries = grown(last.queries, page.queries);
            if !confirms && hits_flat(&meaning, &given, &before) && page.hits.is_some() {
                meaning.forget = Some(Forgot::HitsFlat);
            }
            self.watch_for_stillness(&last, &page, &given, &before);
            self.share(&last, &page, &given, &after);
        }
        meaning.frozen = self.still >= FROZEN;
        if meaning.frozen {
            return meaning;
        }
        let tolerance = if 2 * after.answered >= after.requests { COUNTED_WELL } else { COUNTED_BADLY };
        let share = if self.total > FEW_TOKENS { (self.foreign / self.total).clamp(0.0, 1.0) } else { 0.0 };
        meaning.foreign_share = if share > tolerance { share } else { 0.0 };
        self.add_foreign_requests(meaning, &page, before, after)
    }

    fn add_foreign_requests(
        &self,
        mut meaning: Meaning,
        page: &Page,
        before: Given,
        after: Given,
    ) -> Meaning {
        // The page was written at some time between the two.
        let open = before.open.max(after.open) as f64;
        let prefills = before.prefills.max(after.prefills) as f64;
        let waiting = page.waiting.unwrap_or(0.0);
        meaning.foreign_requests = (page.running.unwrap_or(0.0) + waiting - open).max(0.0);
        meaning.foreign_waiting = (waiting - prefills).clamp(0.0, meaning.foreign_requests);
        meaning
    }

    fn watch_for_stillness(&mut self, last: &Page, page: &Page, given: &Given, before: &Given) {
        let counters = |page: &Page| [page.prompt_tokens, page.generation_tokens, page.queries];
        let (then, now) = (counters(last), counters(page));
        if now.iter().zip(&then).any(|(now, then)| now.is_some() && now != then) {
            self.still = 0;
        } else if before.answered > given.answered && now.iter().any(Option::is_some) {
            self.still += 1;
        }
    }

    fn share(&mut self, last: &Page, page: &Page, given: &Given, after: &Given) {
        let (Some(then), Some(now)) = (last.prompt_tokens, page.prompt_tokens) else { return };
        let own = |given: &Given| given.asked - given.pending;
        self.total = KEEP * self.total + (now - then);
        self.foreign = KEEP * self.foreign + (now - then) - (own(after) - own(given));
    }
}

fn grown(then: Option<f64>, now: Option<f64>) -> f64 {
    then.zip(now).map_or(0.0, |(then, now)| (now - then).max(0.0))
}

fn started_anew(last: &Page, page: &Page) -> bool {
    last.started.zip(page.started).is_some_and(|(then, now)| (now - then).abs() > SAME_START)
}

fn restarted(last: &Page, page: &Page) -> Option<Forgot> {
    let pair = |of: fn(&Page) -> Option<f64>| of(last).zip(of(page));
    if started_anew(last, page) {
        return Some(Forgot::Restarted);
    }
    let counters: [fn(&Page) -> Option<f64>; 4] =
        [|page| page.prompt_tokens, |page| page.generation_tokens, |page| page.queries, |page| page.hits];
    let fell = counters.into_iter().any(|of| pair(of).is_some_and(|(then, now)| now < then));
    fell.then_some(Forgot::CounterFell)
}

/// The engine found nothing at all in what it looked up, though most of it was ours and should have been there.
fn hits_flat(meaning: &Meaning, given: &Given, before: &Given) -> bool {
    let asked = before.asked - given.asked;
    let expected = before.expected - given.expected;
    meaning.hits == 0.0
        && before.requests - given.requests >= ENOUGH_REQUESTS
        && expected >= 0.5 * asked
        && meaning.queries >= 0.5 * asked
        && asked > 0.0
}

impl Page {
    /// What this page says, else what `earlier` said.
    fn or(self, earlier: Page) -> Page {
        Page {
            cache: self.cache.or(earlier.cache),
            running: self.running,
            waiting: self.waiting,
            usage: self.usage,
            queries: self.queries.or(earlier.queries),
            hits: self.hits.or(earlier.hits),
            prompt_tokens: self.prompt_tokens.or(earlier.prompt_tokens),
            generation_tokens: self.generation_tokens.or(earlier.generation_tokens),
            preemptions: self.preemptions.or(earlier.preemptions),
            started: self.started.or(earlier.started),
            told: std::array::from_fn(|at| self.told[at].max(earlier.told[at])),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(prompt_tokens: f64, hits: f64) -> Page {
        Page {
            running: Some(0.0),
            waiting: Some(0.0),
            queries: Some(prompt_tokens),
            hits: Some(hits),
            prompt_tokens: Some(prompt_tokens),
            generation_tokens: Some(prompt_tokens / 10.0),
            started: Some(1_000_000.0),
            ..Page::default()
        }
    }

    /// So many requests of 1,000 tokens, of which so many tokens were believed cached, all answered.
    fn given(requests: u64, expected: f64) -> Given {
        let asked = requests as f64 * 1_000.0;
        Given { requests, answered: requests, asked, expected, ..Given::default() }
    }

    fn take(readings: &mut Readings, page: Page, given: Given) -> Meaning {
        readings.take(page, given, given, false)
    }

    #[test]
    fn a_new_start_or_a_fallen_counter_is_a_new_process() {
        let mut readings = Readings::default();
        assert_eq!(take(&mut readings, page(5_000.0, 10.0), given(0, 0.0)).forget, None);
        let restarted = Page { started: Some(1_000_060.0), ..page(6_000.0, 10.0) };
        assert_eq!(take(&mut readings, restarted, given(1, 0.0)).forget, Some(Forgot::Restarted));
        let fell = Page { started: None, ..page(100.0, 0.0) };
        assert_eq!(take(&mut readings, fell, given(2, 0.0)).forget, Some(Forgot::CounterFell));
        assert_eq!(take(&mut readings, page(200.0, 0.0), given(2, 0.0)).forget, None);
    }

    #[test]
    fn what_is_missing_on_one_page_is_no_fall() {
        let mut readings = Readings::default();
        take(&mut readings, page(5_000.0, 10.0), given(0, 0.0));
        assert_eq!(take(&mut readings, Page::default(), given(1, 0.0)).forget, None);
        assert_eq!(take(&mut readings, page(4_000.0, 10.0), given(1, 0.0)).forget, Some(Forgot::CounterFell));
    }

    /// One of two engines is missing on a page: its sum falls by half and comes back, and neither means anything.
    #[test]
    fn a_page_that_lacks_an_engine_is_left_out_until_it_has_for_long() {
        let of = |engines: u16, tokens: f64| Page { told: [engines; 5], ..page(tokens, 10.0) };
        let mut readings = Readings::default();
        take(&mut readings, of(2, 100_000.0), given(0, 0.0));
        let half = take(&mut readings, of(1, 50_500.0), given(1, 0.0));
        assert!(half.incomplete && half.forget.is_none());
        let whole = take(&mut readings, of(2, 102_000.0), given(2, 0.0));
        assert_eq!((whole.forget, whole.foreign_share, whole.incomplete), (None, 0.0, false));
        let mut lasting = half;
        for _ in 0..LACKING {
            lasting = take(&mut readings, of(1, 51_000.0), given(2, 0.0));
        }
        assert_eq!((lasting.incomplete, lasting.forget), (false, None));
        let anew = Page { started: Some(1_000_060.0), ..of(1, 10.0) };
        assert_eq!(
            take(&mut Readings { lacking: 0, ..readings }, anew, given(2, 0.0)).forget,
            Some(Forgot::Restarted)
        );
    }

    #[test]
    fn hits_that_stay_flat_while_much_was_believed_cached_are_a_reset() {
        let flat = |confirms, expected, hits| {
            let mut readings = Readings::default();
            take(&mut readings, page(0.0, 0.0), given(0, 0.0));
            let given = given(5, expected);
            readings.take(page(5_000.0, hits), given, given, confirms).forget
        };
        assert_eq!(flat(false, 4_000.0, 0.0), Some(Forgot::HitsFlat));
        assert_eq!(flat(false, 4_000.0, 16.0), None, "something was found");
        assert_eq!(flat(false, 500.0, 0.0), None, "little was believed");
        assert_eq!(flat(true, 4_000.0, 0.0), None, "answers tell");
    }

    #[test]
    fn own_traffic_is_not_foreign_however_it_queues() {
        let mut readings = Readings::default();
        take(&mut readings, page(0.0, 0.0), given(0, 0.0));
        let queued = Given { pending: 40_000.0, prefills: 40, open: 40, ..given(50, 0.0) };
        let busy = Page { running: Some(10.0), waiting: Some(30.0), ..page(10_000.0, 0.0) };
        let meaning = take(&mut readings, busy, queued);
        assert_eq!((meaning.foreign_share, meaning.foreign_requests), (0.0, 0.0));
        let meaning = take(&mut readings, page(50_000.0, 0.0), given(50, 0.0));
        assert_eq!((meaning.foreign_share, meaning.foreign_requests), (0.0, 0.0));
    }

    #[test]
    fn half_the_traffic_of_others_is_seen_as_half() {
        let mut readings = Readings::default();
        let mut meaning = Meaning::default();
        for at in 0..20u64 {
            let busy = Page { running: Some(4.0), waiting: Some(3.0), ..page(20_000.0 * at as f64, 0.0) };
            let own = Given { open: 2, prefills: 1, ..given(10 * at, 0.0) };
            meaning = take(&mut readings, busy, own);
        }
        assert!((meaning.foreign_share - 0.5).abs() < 0.01, "{meaning:?}");
        assert_eq!((meaning.foreign_requests, meaning.foreign_waiting), (5.0, 2.0));
    }

    #[test]
    fn a_page_that_stands_still_while_answers_come_is_frozen_until_it_moves() {
        let mut readings = Readings::default();
        let stuck = Page { waiting: Some(50.0), ..page(5_000.0, 10.0) };
        assert!(!take(&mut readings, stuck, given(0, 0.0)).frozen);
        assert!(!take(&mut readings, stuck, given(0, 0.0)).frozen, "nothing came either");
        assert!(!take(&mut readings, stuck, given(3, 0.0)).frozen, "gauges lag");
        let meaning = take(&mut readings, stuck, given(6, 0.0));
        assert!(meaning.frozen);
        assert_eq!(meaning.foreign_waiting, 0.0);
        assert!(!take(&mut readings, page(9_000.0, 10.0), given(9, 0.0)).frozen);
    }
}
