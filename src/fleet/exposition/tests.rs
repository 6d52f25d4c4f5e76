//! Metrics pages as engines, and worse, write them.

use std::path::Path;

use proptest::prelude::*;

use super::*;

fn text(page: &str) -> Page {
    read(page.as_bytes())
}

#[test]
fn the_page_of_a_real_engine() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/vllm");
    let page = std::fs::read(folder.join("get_metrics_after_basic.resp")).unwrap();
    let expected = Page {
        cache: Some(CacheConfig { block_tokens: 16, usable_tokens: 9_344 }),
        running: Some(0.0),
        waiting: Some(0.0),
        usage: Some(0.0),
        queries: Some(911.0),
        hits: Some(640.0),
        prompt_tokens: Some(918.0),
        generation_tokens: Some(302.0),
        preemptions: Some(0.0),
        started: Some(1.79596336651e9),
        told: [1; 5],
    };
    assert_eq!(read(&page), expected);
    // However it is cut.
    for size in [1, 7, 1000, 1460] {
        let mut reader = PageReader::default();
        page.chunks(size).for_each(|piece| reader.feed(piece));
        assert_eq!(reader.finish(), expected, "in pieces of {size}");
    }
}

#[test]
fn every_captured_page_is_read() {
    let captures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/vllm-captures");
    if !captures.is_dir() {
        println!("no captures beside the repository: only the copied one was read");
        return;
    }
    let mut read_pages = 0;
    for folder in ["http", "behaviour", "auth-lora-overload"] {
        for file in std::fs::read_dir(captures.join(folder)).unwrap() {
            let path = file.unwrap().path();
            let bytes = std::fs::read(&path).unwrap();
            if memchr::memmem::find(&bytes, b"\nvllm:cache_config_info{").is_none() {
                continue;
            }
            let page = read(&bytes);
            let usable = page.cache.map(|cache| cache.usable_tokens);
            assert_eq!(usable, Some(9_344), "{}", path.display());
            assert!(page.running.is_some() && page.waiting.is_some() && page.usage.is_some());
            assert!(page.queries >= page.hits && page.hits.is_some() && page.started.is_some());
            read_pages += 1;
        }
    }
    assert!(read_pages >= 5, "only {read_pages} pages");
}

#[test]
fn engines_of_one_worker_are_added_up_in_any_order() {
    let mut lines: Vec<String> = Vec::new();
    for (engine, (running, waiting, usage)) in
        [(1, 0, 0.2), (2, 5, 0.9), (3, 0, 0.1), (4, 0, 0.1)].into_iter().enumerate()
    {
        lines.push(format!("vllm:num_requests_running{{engine=\"{engine}\"}} {running}\n"));
        lines.push(format!("vllm:num_requests_waiting{{engine=\"{engine}\"}} {waiting}\n"));
        lines.push(format!("vllm:kv_cache_usage_perc{{engine=\"{engine}\"}} {usage}\n"));
        lines.push(format!(
            "vllm:cache_config_info{{block_size=\"16\",engine=\"{engine}\",num_gpu_blocks=\"101\"}} 1.0\n"
        ));
    }
    for _ in 0..2 {
        let page = text(&lines.concat());
        assert_eq!((page.running, page.waiting, page.usage), (Some(10.0), Some(5.0), Some(0.9)));
        assert_eq!(page.cache, Some(CacheConfig { block_tokens: 16, usable_tokens: 6_400 }));
        lines.reverse();
    }
}

#[test]
fn new_names_win_over_old_ones_and_either_is_enough() {
    let old = "vllm:gpu_cache_usage_perc 0.5\nvllm:gpu_prefix_cache_hits_total 7\n";
    let new = "vllm:kv_cache_usage_perc 0.25\nvllm:prefix_cache_hits 3\n";
    let read = |page: &str| (text(page).usage, text(page).hits);
    assert_eq!(read(old), (Some(0.5), Some(7.0)));
    assert_eq!(read(new), (Some(0.25), Some(3.0)));
    assert_eq!(read(&[new, old].concat()), (Some(0.25), Some(3.0)));
    assert_eq!(read(&[old, new].concat()), (Some(0.25), Some(3.0)));
    assert_eq!(read(""), (None, None));
}

#[test]
fn what_cannot_be_is_unknown_and_spoils_nothing_else() {
    for value in ["NaN", "+Inf", "-Inf", "-1", "1e300", "", "x", "0x10", "--"] {
        let page = text(&format!("vllm:num_requests_waiting {value}\nvllm:num_requests_running 3\n"));
        assert_eq!((page.waiting, page.running), (None, Some(3.0)), "{value}");
    }
    for labels in [
        "block_size=\"0\",num_gpu_blocks=\"5\"",
        "block_size=\"16\",num_gpu_blocks=\"0\"",
        "block_size=\"16\",num_gpu_blocks=\"None\"",
        "block_size=\"16\"",
        "block_size=\"99999999999999999999\",num_gpu_blocks=\"5\"",
        "block_size=\"16\",num_gpu_blocks=\"5",
        "block_size,num_gpu_blocks",
    ] {
        assert_eq!(text(&format!("vllm:cache_config_info{{{labels}}} 1.0\n")).cache, None, "{labels}");
    }
}

#[test]
fn labels_may_hold_anything() {
    let odd = r#"vllm:cache_config_info{a="}\"{\\",x="num_gpu_blocks=\"9\"" , num_gpu_blocks = "11",block_size="4"} 1.0"#;
    let page = text(&format!("{odd}\nvllm:num_requests_running{{m=\"a }} b\"}} 2 1795963435000\n"));
    assert_eq!(page.cache, Some(CacheConfig { block_tokens: 4, usable_tokens: 40 }));
    assert_eq!(page.running, Some(2.0), "a time may follow");
}

#[test]
fn of_a_repeated_series_the_later_counts() {
    let page = text("vllm:num_requests_running{e=\"0\"} 2\nvllm:num_requests_running{e=\"0\"} 3\n");
    assert_eq!(page.running, Some(3.0));
}

#[test]
fn a_cut_line_is_left_out() {
    let page = text("vllm:num_requests_running 2\nvllm:num_requests_waiting 12");
    assert_eq!((page.running, page.waiting), (Some(2.0), None));
}

#[test]
fn endless_lines_and_engines_cost_no_memory() {
    let mut reader = PageReader::default();
    for _ in 0..100 {
        reader.feed(&[b'x'; 60_000]);
    }
    assert!(reader.line.capacity() <= LONGEST_LINE);
    reader.feed(b"\nvllm:num_requests_running 2\n");
    for engine in 0..5_000 {
        reader.feed(format!("vllm:num_requests_waiting{{engine=\"{engine}\"}} 1\n").as_bytes());
    }
    let page = reader.finish();
    assert_eq!((page.running, page.waiting), (Some(2.0), Some(ENGINES as f64)));
}

proptest! {
    #[test]
    fn nothing_breaks_the_reader_and_pieces_do_not_matter(
        lines in prop::collection::vec(
            prop_oneof![
                "[ -~]{0,40}",
                "vllm:(num_requests_(running|waiting)|kv_cache_usage_perc|prompt_tokens_total)(\\{[a-z=\",\\\\]{0,12}\\})? [-+0-9.eInfNa]{0,8}",
                "vllm:cache_config_info\\{(block_size|num_gpu_blocks)=\"[0-9]{0,4}\",(block_size|num_gpu_blocks)=\"[0-9]{0,22}\"\\} 1",
            ],
            0..20,
        ),
        size in 1usize..50,
    ) {
        let text = lines.join("\n");
        let whole = read(text.as_bytes());
        let mut reader = PageReader::default();
        text.as_bytes().chunks(size).for_each(|piece| reader.feed(piece));
        prop_assert_eq!(reader.finish(), whole);
        for value in [whole.running, whole.waiting, whole.usage, whole.prompt_tokens].into_iter().flatten() {
            prop_assert!(value.is_finite() && value >= 0.0);
        }
    }
}
