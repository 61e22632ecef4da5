#!/bin/bash
ecco hello
